# SPDX-License-Identifier: Apache-2.0
"""Recorded expert routes of the rows of a plan, by micro-batch."""

from typing import Any

import torch

from ..hf import routes
from ..trees import Layout
from .plan import StepPlan


class StepRoutes:
    """Recorded routes of the rows of a StepPlan for the routers of `backbone`.

    given  as hf.routes.routes_of_rows takes them

    Raises Unsupported where they do not fit the model or the rows, and where tokens that rows share have different
    ones."""

    def __init__(self, backbone: Any, step_plan: StepPlan, given: Any) -> None:
        self._plan = step_plan
        self._routes = routes.routes_of_rows(backbone, given, step_plan.offsets)
        for batch in range(len(step_plan)):
            self.of(step_plan.layout(batch))

    def of(self, layout: Layout) -> torch.Tensor:
        """[R, T, K] int64 for the tokens of a micro-batch's layout."""
        tokens, places = self._plan.places(layout)
        return routes.of_forest(self._routes[torch.from_numpy(places)], tokens, layout.num_tokens).long()
