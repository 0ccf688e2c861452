# SPDX-License-Identifier: Apache-2.0
"""Tasks of Ray that are handed patched models, forests, plans, layouts and rows. Runs where Ray is installed."""

import os

import pytest
import torch

import espalier
from conftest import REPOSITORY
from espalier.hf import patch, sharing
from hf_models import branching_rows, make_model, padded

ray = pytest.importorskip("ray")


@pytest.fixture
def cluster():
    paths = os.pathsep.join([str(REPOSITORY / "python"), str(REPOSITORY / "tests/python")])
    ray.init(num_cpus=1, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    yield
    ray.shutdown()


def loss_of(model, batch):
    return model(**batch).loss.item(), sharing(model).batches


def tokens_of(forest, plan, layout, rows):
    return forest.tree_tokens, plan.num_tokens, plan[0].layout().num_tokens, layout.num_tokens, rows.num_tokens


def test_tasks(cluster):
    model, batch = patch(make_model("qwen3_5", torch.float32)), padded(branching_rows())
    loss, batches = ray.get(ray.remote(loss_of).remote(model, batch))
    assert loss == pytest.approx(model(**batch).loss.item(), rel=1e-6) and batches == 1
    forest = espalier.build(branching_rows())
    plan = espalier.plan(forest, token_budget=32, strategy="partition")
    things = forest, plan, forest.layout(), espalier.trajectories(branching_rows())
    assert ray.get(ray.remote(tokens_of).remote(*things)) == tokens_of(*things)
