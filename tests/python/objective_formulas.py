# SPDX-License-Identifier: Apache-2.0
"""Objectives in plain PyTorch, from the log-probabilities of whole trajectories: as papers print them."""

import statistics

import torch
import torch.nn.functional as F


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def weights_of(row):
    given = row.get("loss_weights") or row.get("loss_mask") or [1] * len(row["input_ids"])
    return tensor([float(weight) for weight in given][1:])


def coefficients(rows, normalize):
    """[n - 1] of every row: its weights over the normaliser."""
    weights = [weights_of(row) for row in rows]
    with_loss = sum(bool(each.any()) for each in weights)
    if isinstance(normalize, (int, float)):
        return [each / normalize for each in weights]
    if normalize == "token":
        return [each / sum(other.sum() for other in weights) for each in weights]
    if normalize == "sequence":
        return [each / each.sum().clamp(min=1e-300) / with_loss for each in weights]
    if normalize == "sequence-sum":
        return [each / with_loss for each in weights]
    assert normalize == "group"
    sums = {}
    for row, each in zip(rows, weights):
        if each.any():
            sums[row["group_id"]] = sums.get(row["group_id"], 0) + each.sum()
    return [each / sums[row["group_id"]] / len(sums) if each.any() else each for row, each in zip(rows, weights)]


def turns_of(row):
    """Of each token but the first: the number of the turn that it is in, or that was the last one before it, from 0."""
    mask = [weight > 0 for weight in weights_of(row).tolist()]
    starts = [t for t in range(len(mask)) if mask[t] and (t == 0 or not mask[t - 1])]
    return [sum(start <= t for start in starts) - 1 for t in range(len(mask))]


def turn_advantages(rows, baseline, scale, discount):
    returns = [[sum(discount ** (j - k) * r[j] for j in range(k, len(r))) for k in range(len(r))]
               for r in (row["turn_rewards"] for row in rows)]  # fmt: skip
    result = []
    for row, own in zip(rows, returns):
        of_turn = []
        for k, value in enumerate(own):
            same = [other[k] for each, other in zip(rows, returns) if each["group_id"] == row["group_id"] and k < len(other)]
            center = {"mean": statistics.mean(same), "none": 0,
                      "leave-one-out": (sum(same) - value) / (len(same) - 1) if len(same) > 1 else value}[baseline]
            of_turn.append((value - center) / ((statistics.stdev(same) if len(same) > 1 else 0) + 1e-6 if scale else 1))
        result.append(tensor([of_turn[turn] if turn >= 0 else 0 for turn in turns_of(row)]))
    return result


def advantages(rows, baseline="mean", scale=True, discount=1):
    """[n - 1] of every row, from rewards and groups."""
    if "turn_rewards" in rows[0]:
        return turn_advantages(rows, baseline, scale, discount)
    result = []
    for row in rows:
        group = [other["reward"] for other in rows if other["group_id"] == row["group_id"]]
        if baseline == "mean":
            value = row["reward"] - statistics.mean(group)
        elif baseline == "leave-one-out":
            value = row["reward"] - (sum(group) - row["reward"]) / (len(group) - 1)
        else:
            assert baseline == "none"
            value = row["reward"]
        if scale:
            value /= statistics.stdev(group) + 1e-6
        mask = [weight > 0 for weight in weights_of(row).tolist()]
        starts = [t for t in range(len(mask)) if mask[t] and (t == 0 or not mask[t - 1])]
        result.append(tensor([value * discount ** sum(start > t for start in starts) for t in range(len(mask))]))
    return result


def divergence(logprobs, reference, estimator):
    difference = logprobs - reference
    return {"k1": difference, "k2": difference**2 / 2, "k3": torch.exp(-difference) - 1 + difference}[estimator]


def policy_loss(kind, rows, logprobs, *, normalize, clip_low=0.2, clip_high=0.2, dual_clip=0, baseline="mean", scale=True,
                discount=1, weights="none", level="token", cap=2, floor=0.5, kl_coef=0, kl_estimator="k3"):  # fmt: skip
    """ppo, grpo, dr_grpo, dapo, gspo, cispo, reinforce."""
    loss = 0
    for row, p, c, a in zip(rows, logprobs, coefficients(rows, normalize), advantages(rows, baseline, scale, discount)):
        carries = c > 0
        old = tensor([value or 0 for value in row["logprobs"]][1:]) if "logprobs" in row else p.detach()
        w = 1
        log_ratio = p - old
        if weights != "none":
            w = torch.exp((log_ratio * carries).sum() if level == "sequence" else log_ratio).detach()
            w = w.clamp(max=cap) if weights == "truncate" else w * ((w >= floor) & (w <= cap))
            log_ratio = p - p.detach()
        if kind == "gspo":
            log_ratio = (c * log_ratio).sum() / c.sum() if carries.any() else torch.zeros_like(p)
        ratio = torch.exp(log_ratio)
        clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
        if kind == "reinforce":
            value = a * p
        elif kind == "cispo":
            value = clipped.detach() * a * p
        else:
            value = torch.minimum(ratio * a, clipped * a)
            if dual_clip:
                value = torch.where(a < 0, torch.maximum(value, dual_clip * a), value)
        loss = loss - (c * w * value).sum()
        if kl_coef:
            loss = loss + kl_coef * (c * divergence(p, tensor(row["ref_logprobs"][1:]), kl_estimator)).sum()
    return loss


def opd_loss(rows, logprobs, *, normalize="token"):
    loss = 0
    for row, p, c in zip(rows, logprobs, coefficients(rows, normalize)):
        old = tensor([value or 0 for value in row["logprobs"]][1:]) if "logprobs" in row else p.detach()
        advantage = (tensor(row["ref_logprobs"][1:]) - p).detach()
        loss = loss - (c * torch.exp(p - old) * advantage).sum()
    return loss


def opd_topk_loss(rows, distributions, *, form, normalize="token"):
    """distributions: log-probabilities [n - 1, V] of every row."""
    loss = 0
    for row, log_p, c in zip(rows, distributions, coefficients(rows, normalize)):
        for t in range(len(c)):
            if c[t] == 0:
                continue
            p = torch.exp(log_p[t][torch.tensor(row["ref_topk_ids"][t + 1])])
            q = torch.exp(tensor(row["ref_topk_logprobs"][t + 1]))
            if form == "renormalize":
                p, q = p / p.sum(), q / q.sum()
            else:
                p, q = torch.cat([p, 1 - p.sum()[None]]), torch.cat([q, 1 - q.sum()[None]])
            loss = loss + c[t] * torch.sum(p * torch.log(p / q))
    return loss


def entropy_bonus(rows, entropies, coefficient, normalize):
    """What it adds to the loss; entropies [n - 1] of every row."""
    return -coefficient * sum((c * h).sum() for c, h in zip(coefficients(rows, normalize), entropies))


def score(row, p, reference, mean):
    w = weights_of(row)
    value = (w * (p - tensor(row["ref_logprobs"][1:]) if reference else w * p)).sum()
    return value / w.sum() if mean else value


def preference_loss(kind, rows, logprobs, *, beta, margin=1.0):
    """dpo, ipo, simpo, orpo: the mean over the pairs."""
    reference, mean = kind in ("dpo", "ipo"), kind != "dpo"
    scores = {(row["pair_id"], row["chosen"]): score(row, p, reference, mean) for row, p in zip(rows, logprobs)}
    losses = []
    for pair in {row["pair_id"] for row in rows}:
        chosen, rejected = scores[pair, True], scores[pair, False]
        if kind == "dpo":
            losses.append(-F.logsigmoid(beta * (chosen - rejected)))
        elif kind == "ipo":
            losses.append((chosen - rejected - 1 / (2 * beta)) ** 2)
        elif kind == "simpo":
            losses.append(-F.logsigmoid(beta * (chosen - rejected) - margin))
        else:
            odds = lambda s: torch.exp(s) / (1 - torch.exp(s))
            losses.append(-chosen - beta * F.logsigmoid(torch.log(odds(chosen) / odds(rejected))))
    return torch.stack(losses).mean()


def kto_loss(rows, logprobs, *, beta, chosen_weight=1.0, rejected_weight=1.0):
    """The mean over the rows that have `chosen`."""
    scores = [score(row, p, True, False) for row, p in zip(rows, logprobs)]
    free = [s for row, s in zip(rows, scores) if "chosen" not in row]
    point = torch.stack(free or scores).mean().clamp(min=0).detach()
    losses = []
    for row, s in zip(rows, scores):
        if row.get("chosen"):
            losses.append(chosen_weight * (1 - torch.sigmoid(beta * (s - point))))
        elif "chosen" in row:
            losses.append(rejected_weight * (1 - torch.sigmoid(beta * (point - s))))
    return torch.stack(losses).mean()
