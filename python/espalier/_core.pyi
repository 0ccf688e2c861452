"""The compiled part of Espalier that does not need LibTorch."""

from collections.abc import Iterator, Sequence
import os
import pathlib
from typing import Annotated, Any

import numpy
import numpy.typing
from numpy.typing import NDArray


class Forest:
    """
    The prefix trees of a set of trajectories, in preorder: the tokens of a node are contiguous, and its
    descendants follow it directly. `espalier.build` creates it. Arrays are read-only views.

    Examples:
        >>> import espalier
        >>> forest = espalier.build([[1, 2, 3, 4], [1, 2, 5]])
        >>> forest.tokens.tolist(), forest.parent.tolist()
        ([1, 2, 3, 4, 5], [-1, 0, 0])
    """

    @property
    def tokens(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]:
        """int32 [tree_tokens]: every distinct token once"""

    @property
    def node_begin(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]:
        """
        int64 [num_nodes + 1]: node n is tokens [node_begin[n], node_begin[n + 1])
        """

    @property
    def parent(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]:
        """int64 [num_nodes]: the preceding node on the path, -1 at a root"""

    @property
    def subtree_last(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]:
        """int64 [num_nodes]: one past the last node of the node's subtree"""

    @property
    def position(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]:
        """int64 [num_nodes]: position of the node's first token on its root path"""

    @property
    def multiplicity(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]:
        """
        int64 [num_nodes]: trajectories that pass through the node or end in it
        """

    @property
    def end_node(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]:
        """int64 [num_trajectories]: the node at whose end the trajectory ends"""

    @property
    def num_nodes(self) -> int:
        """Nodes of all trees."""

    @property
    def num_trajectories(self) -> int:
        """Rows that the forest was built from."""

    @property
    def tree_tokens(self) -> int:
        """Tokens without repetition."""

    @property
    def flat_tokens(self) -> int:
        """Tokens with repetition: all tokens of the rows."""

    def layout(self) -> Layout:
        """
        The whole forest as one micro-batch: a Layout whose run k is node k.

        Raises:
            InputError: It has more tokens than an int32 can count.
        """

    def statistics(self) -> dict[str, Any]:
        """
        How much the trajectories share, as a dict: trajectories, trees, nodes and leaves; tokens and visible
        (query, key) pairs flat, in the tree, and after append-only merging; cached_token_ratio (flat / tree), por
        (1 - tree / flat); depth and branching.
        """

    def __getstate__(self) -> tuple: ...

    def __setstate__(self, arg: tuple, /) -> None: ...

    def __repr__(self) -> str: ...

class Layout:
    """
    The T tokens of one micro-batch in preorder, and their visibility: token j sees token i if
    i <= j < subtree_end[i]. A run is a range of consecutive tokens of one root path; its descendants
    follow it directly. Arrays are read-only views.

    Examples:
        >>> import espalier
        >>> layout = espalier.build([[1, 2, 3, 4], [1, 2, 5]]).layout()
        >>> layout.subtree_end.tolist()
        [5, 5, 4, 4, 5]
        >>> layout.path(1).tolist()
        [0, 1, 4]
    """

    @property
    def forest_token(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]:
        """int64 [T]: index into Forest.tokens"""

    @property
    def input_ids(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]:
        """int32 [T]: the tokens"""

    @property
    def position_ids(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]:
        """int32 [T]: position on the root path"""

    @property
    def subtree_end(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]:
        """int32 [T]: one past the last token of the subtree of the token's run"""

    @property
    def prev(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]:
        """int32 [T]: the preceding token on the path, -1 at a root"""

    @property
    def run_begin(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]:
        """int64 [num_runs + 1]: run k is tokens [run_begin[k], run_begin[k + 1])"""

    @property
    def run_parent(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]:
        """int64 [num_runs]: the preceding run on the path, -1 at a root"""

    @property
    def trajectories(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]:
        """int64: the trajectories that are in this layout, ascending"""

    @property
    def end_run(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]:
        """
        int64: for each of `trajectories`, the run at whose end its path leaves this layout
        """

    @property
    def multiplicity(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]:
        """int64 [T]: how many of `trajectories` pass through the token"""

    @property
    def num_tokens(self) -> int:
        """T"""

    @property
    def num_runs(self) -> int:
        """Runs of all paths."""

    def path(self, trajectory: int) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """
        int64 [length]: the indices of the trajectory's tokens in this layout, from its root.

        Args:
            trajectory: Its number in the forest.

        Raises:
            InputError: The trajectory is not in this layout.
        """

    def paths(self) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,))], Annotated[NDArray[numpy.int64], dict(shape=(None,))]]:
        """
        The paths of all `trajectories` as (offsets, indices): trajectory number k of them has
        indices[offsets[k]:offsets[k + 1]]. Both are int64.
        """

    def visible_intervals(self, sliding_window: int = 0) -> Annotated[NDArray[numpy.int32], dict(shape=(None, None))]:
        """
        The keys that each token sees, as intervals: what attention libraries with interval masks take.

        Args:
            sliding_window: 0 for none, else tokens see ancestors less than so many positions away.

        Returns:
            int32 [F, T], F odd. Column i holds F increasing numbers f0, f1, ...: token i sees token j where
            j < f0, or f1 <= j < f2, or f3 <= j < f4, and so on. This is `mask_func` of cudnn.flex_attention, without its
            first dimension. F is at most 1 + 2 log2(leaves) for trees of `build(rows, most_leaves_first=True)`,
            and 2 more for forests and windows.

        Examples:
            >>> import espalier
            >>> espalier.build([[1, 2, 3, 4], [1, 2, 5]]).layout().visible_intervals().tolist()
            [[1, 2, 3, 4, 2], [1, 2, 3, 4, 4], [1, 2, 3, 4, 5]]
        """

    def __len__(self) -> int: ...

    def __getstate__(self) -> tuple: ...

    def __setstate__(self, arg: tuple, /) -> None: ...

    def __repr__(self) -> str: ...

def build_forest(offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], merge_keys: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, tree_keys: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, most_leaves_first: bool = False) -> Forest:
    """
    espalier.build of arrays: offsets int64 [R + 1], tokens int32 [N], merge_keys uint64 [N],
    tree_keys int64 [R].
    """

def visible_intervals(subtree_end: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], position: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, sliding_window: int = 0, context_blocks: Annotated[NDArray[numpy.int64], dict(shape=(None, 5), order='C', device='cpu', writable=False)] | None = None, context_positions: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> Annotated[NDArray[numpy.int32], dict(shape=(None, None))]:
    """
    Layout.visible_intervals of the arguments of espalier.ops.tree_attention: subtree_end and position int32 [T],
    context_blocks int64 [P, 5], context_positions int64 [P] of each block's first key. Keys are those of the
    context blocks, one block after another, then the tokens.
    """

class Trajectories:
    """
    Rows of token ids with loss mask, log-probabilities, advantages and so on, in columns. Per-token columns
    are aligned: row r has entries [offsets[r], offsets[r + 1]). Columns are read-only views, for packed files of
    the mapped file; columns that no row has are None. Index r returns a copy of the row as a dict.

    Examples:
        >>> import espalier
        >>> rows = espalier.trajectories([{"input_ids": [1, 2, 3], "reward": 0.5}])
        >>> rows.num_tokens, rows.reward.tolist(), rows.advantages
        (3, [0.5], None)
    """

    @property
    def offsets(self) -> numpy.typing.NDArray[numpy.int64]:
        """int64 [R + 1]"""

    @property
    def input_ids(self) -> numpy.typing.NDArray[numpy.int32]:
        """int32 [N]"""

    @property
    def loss_weights(self) -> numpy.typing.NDArray[numpy.uint8] | numpy.typing.NDArray[numpy.floating]:
        """
        [N], uint8 if the rows have a mask, else float32 or float64; 1 where they have neither
        """

    @property
    def logprobs(self) -> numpy.typing.NDArray[numpy.floating] | None:
        """float32 or float64 [N]: behaviour policy"""

    @property
    def ref_logprobs(self) -> numpy.typing.NDArray[numpy.floating] | None:
        """float32 or float64 [N]: reference model"""

    @property
    def advantages(self) -> numpy.typing.NDArray[numpy.floating] | None:
        """float32 or float64 [N]"""

    @property
    def reward(self) -> numpy.typing.NDArray[numpy.floating] | None:
        """float32 or float64 [R]"""

    @property
    def temperature(self) -> numpy.typing.NDArray[numpy.floating] | None:
        """float32 or float64 [R]: of logprobs and ref_logprobs"""

    @property
    def top_k(self) -> numpy.typing.NDArray[numpy.floating] | None:
        """float32 or float64 [R]: how many tokens the policy chose among"""

    @property
    def top_p(self) -> numpy.typing.NDArray[numpy.floating] | None:
        """
        float32 or float64 [R]: the probability of the tokens that it chose among
        """

    @property
    def turn_rewards(self) -> numpy.typing.NDArray[numpy.floating] | None:
        """
        float32 or float64: one per turn, row r has [turn_reward_offsets[r], turn_reward_offsets[r + 1])
        """

    @property
    def turn_reward_offsets(self) -> numpy.typing.NDArray[numpy.int64] | None:
        """int64 [R + 1]"""

    @property
    def ref_topk_ids(self) -> numpy.typing.NDArray[numpy.int32] | None:
        """
        int32 [N, K]: the reference model's most likely tokens at each position, -1 where there are none
        """

    @property
    def ref_topk_logprobs(self) -> numpy.typing.NDArray[numpy.floating] | None:
        """float32 or float64 [N, K], 0 where there are none"""

    @property
    def chosen(self) -> numpy.typing.NDArray[numpy.uint8] | None:
        """uint8 [R]"""

    @property
    def present(self) -> dict[str, numpy.typing.NDArray[numpy.uint8]]:
        """
        uint8 [R] by name, for the columns that only some rows have; they hold 0 for the others
        """

    @property
    def trajectory_id(self) -> list[str] | None:
        """list of str [R], empty for rows without one"""

    @property
    def group_id(self) -> list[str] | None:
        """list of str [R], empty for rows without one"""

    @property
    def pair_id(self) -> list[str] | None:
        """list of str [R], empty for rows without one"""

    @property
    def routed_experts(self) -> numpy.typing.NDArray[numpy.int32] | None:
        """int32 [N, routes per token], -1 in rows without routes"""

    @property
    def num_rows(self) -> int:
        """R"""

    @property
    def num_tokens(self) -> int:
        """N"""

    def name(self, row: int) -> str:
        """
        The row's name in messages: its trajectory_id, or its number.

        Args:
            row: Its number.
        """

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> dict[str, Any]: ...

    def __getstate__(self) -> dict: ...

    def __setstate__(self, arg: dict, /) -> None: ...

    def __repr__(self) -> str: ...

class TrajectoriesBuilder:
    """Collects rows whose arrays have the types of the columns."""

    def __init__(self) -> None: ...

    def append(self, row: dict) -> None:
        """
        Checks the row, a dict by field whose lists are arrays of the columns' types, and appends it. Raises
        InputError naming the field.
        """

    def finish(self) -> Trajectories:
        """The rows as Trajectories; the builder is empty afterwards."""

MAX_ROW_BYTES: int = 268435456

def trajectories_of_columns(columns: dict) -> Trajectories:
    """
    Trajectories that view the arrays of a dict. Arrays have the types of a packed file's columns.
    """

def read(paths: Sequence[str | os.PathLike], vocab_size: int, skip_bad_rows: bool, max_rows: int, max_line_bytes: int) -> tuple:
    """
    (trajectories, skipped rows, their first errors, per-token fields that were ignored).
    """

def expand_file_patterns(patterns: Sequence[str | os.PathLike]) -> list[pathlib.Path]:
    """The files that names and patterns match."""

def write(path: str | os.PathLike, trajectories: Trajectories) -> None:
    """Writes JSON Lines or packed safetensors, atomically."""

def checked_row(row: dict) -> dict:
    """
    The row that a dict is: ids are integers, masks 0 and 1, other numbers floats, and unknown log-probabilities
    of tokens without loss None. Raises InputError that names the field.
    """

class RowWriter:
    """
    Writes rows to a file, in the form that its name asks for. The file appears when a `with` block
    ends without an exception. `memory`: bytes of columns that are kept in memory.
    """

    def __init__(self, path: str | os.PathLike, memory: int = 16777216) -> None: ...

    def __enter__(self) -> RowWriter: ...

    def __exit__(self, kind: object, error: object, traceback: object) -> None: ...

    def add(self, row: dict) -> None:
        """
        Writes a dict as checked_row takes it. Raises InputError that names the field.
        """

class TextFile:
    """
    A file of text in UTF-8, compressed if its name ends in .gz or .zst. It appears when a `with` block ends
    without an exception.
    """

    def __init__(self, path: str | os.PathLike) -> None: ...

    def __enter__(self) -> TextFile: ...

    def __exit__(self, kind: object, error: object, traceback: object) -> None: ...

    def write(self, text: str) -> None: ...

class AtomicFile:
    """
    A file that others write under the name `temporary`. It gets its own name when a `with` block ends
    without an exception, else it is removed.
    """

    def __init__(self, path: str | os.PathLike) -> None: ...

    def __enter__(self) -> AtomicFile: ...

    def __exit__(self, kind: object, error: object, traceback: object) -> None: ...

    @property
    def temporary(self) -> pathlib.Path: ...

class Costs:
    """
    The cost of a model's forward and backward passes: FLOPs by its config.json, and seconds by
    built-in or measured rates.

    Examples:
        >>> import espalier, transformers
        >>> config = transformers.LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=48,
        ...                                   num_attention_heads=4, num_key_value_heads=2)
        >>> espalier.costs(config).model_type
        'llama'
    """

    @property
    def model_type(self) -> str:
        """The family, as in config.json."""

    @property
    def calibrated(self) -> bool:
        """
        Whether the rates were measured. Built-in rates suffice to compare plans, but do not predict times.
        """

    def __repr__(self) -> str: ...

def costs(model: str | os.PathLike, device: str, cost_model: str | os.PathLike | None) -> Costs:
    """Implements espalier.costs."""

def pair_cost(costs: Costs | None) -> float:
    """
    What a visible pair of tokens costs, where a token costs 1; None: in a typical decoder.
    """

class MicroBatch:
    """
    The unit of one forward and backward pass. Under partition it reads context: tokens of its ancestors,
    micro-batches that run before it.

    Examples:
        >>> import espalier
        >>> root, rest = espalier.plan(espalier.build([[1, 2, 3, 4], [1, 2, 5]]), token_budget=4)
        >>> rest.parent, rest.num_tokens, rest.context_tokens
        (0, 4, 1)
    """

    @property
    def index(self) -> int:
        """Its index in the plan, the order of forward passes."""

    @property
    def parent(self) -> int:
        """
        The micro-batch whose context it inherits, -1: none. Its backward pass precedes the parent's.
        """

    @property
    def num_tokens(self) -> int:
        """Tokens it encodes."""

    @property
    def num_pairs(self) -> int:
        """Visible (query, key) pairs of these tokens, keys in context included."""

    @property
    def context_tokens(self) -> int:
        """Tokens of other micro-batches that it reads, each counted once."""

    @property
    def seconds(self) -> float | None:
        """
        Predicted for forward and backward, 0 if no token carries loss. None without a model.
        """

    @property
    def context(self) -> numpy.typing.NDArray[numpy.int64]:
        """
        int64 [blocks, 6]: dense blocks of the mask between this micro-batch and its ancestors. Each row is
        (ancestor, column_begin, column_end, row_begin, row_end, position): these columns of the ancestor's
        layout are visible to these rows of this layout; the first column has this position on its path.
        """

    @property
    def context_runs(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """
        int64: for each root run of the layout, the run of the parent that it continues.
        """

    def layout(self) -> Layout:
        """
        The tokens that it encodes as a Layout, without its context. A path in it is the part of a trajectory
        in this micro-batch.
        """

    def to_dict(self) -> dict[str, Any]:
        """
        Its counts, trajectories and runs [begin, end, parent run] of forest tokens.
        """

    def __reduce__(self) -> tuple: ...

    def __repr__(self) -> str: ...

class Plan:
    """
    Micro-batches in the order of their forward passes. It has a length, and index m gives a MicroBatch.

    Examples:
        >>> import espalier
        >>> plan = espalier.plan(espalier.build([[1, 2, 3, 4], [1, 2, 5]]), token_budget=4)
        >>> plan.strategy, len(plan), plan[0].num_tokens
        ('partition', 2, 1)
    """

    @property
    def strategy(self) -> str:
        """
        The strategy that was chosen: partition, tree-packing, append-only or sequence-packing.
        """

    @property
    def token_budget(self) -> int:
        """Maximum tokens per micro-batch; 0: no limit."""

    @property
    def num_tokens(self) -> int:
        """Encoded tokens: those of the tree, and prefixes that packing repeats."""

    @property
    def num_pairs(self) -> int:
        """Visible (query, key) pairs."""

    @property
    def effective_reuse_ratio(self) -> float:
        """ERR: the fraction of the flat tokens that is not recomputed."""

    @property
    def flops(self) -> float | None:
        """
        FLOPs of forward and backward, a multiply-add counted as two. None without a model.
        """

    @property
    def seconds(self) -> float | None:
        """
        Predicted for forward and backward of all micro-batches. None without a model.
        """

    @property
    def speedup_over_sequence_packing(self) -> float:
        """
        Upper bound of the speed-up over encoding every trajectory separately: in FLOPs, without a model in tokens.
        """

    @property
    def speedup_over_append_only(self) -> float:
        """
        Likewise over append-only merging, which drops trajectories that others extend.
        """

    def to_dict(self) -> dict[str, Any]:
        """
        The plan as numbers, lists and dicts, as `espalier plan --json` prints it.
        """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[MicroBatch]: ...

    def __getitem__(self, index: int) -> MicroBatch: ...

    def __reduce__(self) -> tuple: ...

    def __repr__(self) -> str: ...

class KeyReads:
    """
    The keys that one rank sends, receives and sees in the attention of a divided micro-batch.
    """

    @property
    def picks(self) -> list[Annotated[NDArray[numpy.int64], dict(shape=(None,))]]:
        """
        By source int64: its rows that are sent, each once for every reader. Sources are the ancestors whose context
        the micro-batch reads, root first, and then the micro-batch itself.
        """

    @property
    def order(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """
        int64: all picks, one source after another, in the order of sending; empty: as they are.
        """

    @property
    def send(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """int64 [ranks]: keys for each."""

    @property
    def receive(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """int64 [ranks]: keys from each."""

    @property
    def most_received(self) -> int:
        """Keys of the rank that receives most."""

    @property
    def blocks(self) -> numpy.typing.NDArray[numpy.int64]:
        """
        int64 [P, 5], as ops.tree_attention takes them. Segments are this rank's rows of the ancestors, and then what
        it receives, by rank.
        """

    @property
    def positions(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """int64 [P]: of each block's first key."""

class DividedPlan:
    """A Plan whose micro-batches are divided over ranks."""

    def ranges(self, micro_batch: int) -> numpy.typing.NDArray[numpy.int64]:
        """
        int64 [N, 3]: each range as (begin, end, rank), in the order of the tokens, which they cover.
        """

    def costs(self, micro_batch: int) -> Annotated[NDArray[numpy.float64], dict(shape=(None,))]:
        """float64 [ranks]: of each, where a token costs 1."""

    def tokens(self, micro_batch: int, rank: int) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """int64: the tokens of a rank in the layout, ascending."""

    def key_reads(self, micro_batch: int, layout: Layout, rank: int, window: int, chunk: int) -> KeyReads:
        """
        What attention reads on a rank with a sliding window or in chunks, 0: none. layout: of the micro-batch.
        """

def plan(forest: Forest, strategy: str, token_budget: int, costs: Costs | None, loss_mask: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)] | None) -> Plan:
    """Implements espalier.plan."""

def divide(plan: Plan, ranks: int, pair_cost: float, is_contiguous: bool) -> DividedPlan:
    """
    Divides the micro-batches of a plan over ranks. is_contiguous: each gets one range, as recurrences want it.
    """

def restored_plan(forest: Forest, state: dict) -> Plan:
    """Restores a pickled Plan."""

class RankShare:
    """
    The share of one rank: a forest of its trajectories.

    Examples:
        >>> import espalier
        >>> share = espalier.distribute(espalier.build([[1, 2, 3, 4], [1, 2, 5]]), ranks=2)[0]
        >>> share.trajectories.size, share.tree_tokens
        (1, 4)
    """

    @property
    def trajectories(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]:
        """
        int64: trajectories of the whole forest, ascending; empty if the rank is idle.
        """

    @property
    def seconds(self) -> float:
        """
        Predicted for forward and backward; without a model up to a common factor.
        """

    @property
    def tree_tokens(self) -> int:
        """Tokens of the rank's own forest."""

    def __getstate__(self) -> tuple: ...

    def __setstate__(self, arg: tuple, /) -> None: ...

    def __repr__(self) -> str: ...

class Distribution:
    """
    The trajectories of each rank. It has a length, and index r gives the RankShare of rank r.

    Examples:
        >>> import espalier
        >>> shares = espalier.distribute(espalier.build([[1, 2, 3, 4], [1, 2, 5]]), ranks=2)
        >>> shares.split_trees, shares.repeated_tokens
        (1, 2)
    """

    @property
    def imbalance(self) -> float:
        """The slowest rank's seconds over the mean, less 1."""

    @property
    def seconds(self) -> float:
        """Of the slowest rank."""

    @property
    def least_seconds(self) -> float:
        """A lower bound for every distribution."""

    @property
    def context_parallel(self) -> int:
        """Ranks that have each share together."""

    @property
    def split_trees(self) -> int:
        """Trees that are on several ranks."""

    @property
    def repeated_tokens(self) -> int:
        """
        Prefix tokens that are encoded more than once: the tokens of all ranks less those of the forest.
        """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[RankShare]: ...

    def __getitem__(self, rank: int) -> RankShare: ...

    def __getstate__(self) -> tuple: ...

    def __setstate__(self, arg: tuple, /) -> None: ...

    def __repr__(self) -> str: ...

def distribute(forest: Forest, ranks: int, costs: Costs | None, context_parallel: int, bandwidth: float) -> Distribution:
    """Implements espalier.distribute."""

def build_from_trajectories(trajectories: Trajectories, tree_keys: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, most_leaves_first: bool = False) -> Forest:
    """espalier.build of Trajectories: tree_keys int64 [R]."""

class RowsReport:
    """The result of espalier.inspect."""

    @property
    def forest(self) -> Forest:
        """The prefix trees of the rows."""

    def json(self) -> str:
        """The output of `espalier inspect --json`."""

    def page_data(self, title: str) -> str:
        """What espalier.page makes the page of `espalier inspect --html` of."""

def inspect(trajectories: Trajectories, offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, texts: bytes = ...) -> RowsReport:
    """Implements espalier.inspect: offsets int64 [V + 1]."""

def manifest_fault(folder: str | os.PathLike, title: str) -> str:
    """
    Compares a checkpoint with the checksums of its manifest. Returns the first fault in a sentence,
    empty if there is none. A checkpoint without a manifest has none.
    """

def run_command(name: str, options: Sequence[tuple[str, bytes]], caller: object) -> tuple[int, str]:
    """
    Runs inspect, plan or synth with options, pairs of name and text. Returns the exit status and what there is to print, as JSON.
    """

def describe_command(name: str) -> str:
    """Its options, as JSON."""

def check_options(name: str, options: Sequence[tuple[str, bytes]]) -> None:
    """
    Raises UsageError for options that the command lacks, and values that they cannot have.
    """

def build() -> dict:
    """
    Properties of this build. Raises InputError if ESPALIER_CPU names an instruction set that this machine lacks.
    """

def listen(line: object | None, progress: object | None, end: object | None) -> None:
    """
    From now on calls line(text), progress(work, fraction, detail) and end() with what the library says of long work, from any thread. None: no longer.
    """

def remove_temporaries() -> None:
    """
    Removes files that are half written. To be called before a signal ends the process.
    """

def guard_files() -> None:
    """
    From now on a mapped file that becomes shorter is an error of the work that reads it, and no longer the end of the process.
    """
