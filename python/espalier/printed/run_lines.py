# SPDX-License-Identifier: Apache-2.0
"""Log lines of a training run."""

from typing import Any


def step_line(step: int, total: int, metrics: dict[str, Any]) -> str:
    """A step; the metrics as in metrics.jsonl."""
    line = (f"step {step}/{total}  loss {metrics['loss']:.6g}  grad norm {metrics['grad_norm']:.4g}  "
            f"lr {metrics['learning_rate']:.3g}  {round(metrics['tree_tokens_per_second']):,} tree tokens/s  "
            f"{round(metrics['flat_tokens_per_second']):,} flat tokens/s  {metrics['seconds']:.2f} s")  # fmt: skip
    if "clip_fraction" in metrics:
        line += f"  clipped {metrics['clip_fraction']:.3f}"
    if "ratio_mean" in metrics:
        line += f"  ratio {metrics['ratio_mean']:.4f}"
    line += _preferences(metrics, "reward")
    if "entropy" in metrics:
        line += f"  entropy {metrics['entropy']:.4f}"
    if "router_aux_loss" in metrics:
        line += f"  balance {metrics['router_aux_loss']:.4f}"
    return line


def evaluation_line(step: int, total: int, values: dict[str, Any], best_step: int, best_loss: float) -> str:
    """An evaluation, and the best one so far."""
    line = (f"evaluation after step {step}/{total}  loss {values['eval_loss']:.6g}  "
            f"nll {values['eval_nll_per_token']:.6g} per token{_preferences(values, 'eval_reward')}")  # fmt: skip
    if best_step == step:
        line += "  the best so far"
    elif best_step > 0:
        line += f"  best {best_loss:.6g} after step {best_step}"
    return f"{line}  {values['eval_seconds']:.2f} s"


def _preferences(values: dict[str, Any], name: str) -> str:
    if f"{name}_accuracy" not in values:
        return ""
    return f"  margin {values[f'{name}_margin']:.4f}  accuracy {values[f'{name}_accuracy']:.3f}"
