# SPDX-License-Identifier: Apache-2.0
"""Log lines of a training run. A number that is not finite comes as null."""

from typing import Any


def step_line(step: int, total: int, metrics: dict[str, Any]) -> str:
    """A step; the metrics as in metrics.jsonl."""
    speeds = (f"{round(metrics[name] or 0):,} {name.partition('_')[0]} tokens/s"
              for name in ("tree_tokens_per_second", "flat_tokens_per_second"))  # fmt: skip
    line = (f"step {step}/{total}  loss {_number(metrics['loss'], '.6g')}  grad norm {_number(metrics['grad_norm'], '.4g')}  "
            f"lr {_number(metrics['learning_rate'], '.3g')}  {'  '.join(speeds)}  {metrics['seconds']:.2f} s")  # fmt: skip
    if "clip_fraction" in metrics:
        line += f"  clipped {_number(metrics['clip_fraction'], '.3f')}"
    if "ratio_mean" in metrics:
        line += f"  ratio {_number(metrics['ratio_mean'], '.4f')}"
    line += _preferences(metrics, "reward")
    if "entropy" in metrics:
        line += f"  entropy {_number(metrics['entropy'], '.4f')}"
    if "router_aux_loss" in metrics:
        line += f"  balance {_number(metrics['router_aux_loss'], '.4f')}"
    return line


def evaluation_line(step: int, total: int, values: dict[str, Any], best_step: int, best_loss: float) -> str:
    """An evaluation, and the best one so far."""
    line = (f"evaluation after step {step}/{total}  loss {_number(values['eval_loss'], '.6g')}  "
            f"nll {_number(values['eval_nll_per_token'], '.6g')} per token{_preferences(values, 'eval_reward')}")  # fmt: skip
    if best_step == step:
        line += "  the best so far"
    elif best_step > 0:
        line += f"  best {best_loss:.6g} after step {best_step}"
    return f"{line}  {values['eval_seconds']:.2f} s"


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)


def _preferences(values: dict[str, Any], name: str) -> str:
    if f"{name}_accuracy" not in values:
        return ""
    margin, accuracy = (_number(values[f"{name}_{each}"], form) for each, form in (("margin", ".4f"), ("accuracy", ".3f")))
    return f"  margin {margin}  accuracy {accuracy}"
