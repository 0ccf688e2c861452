# SPDX-License-Identifier: Apache-2.0
"""What the YAML of Axolotl may have for Espalier."""

from typing import Literal

from pydantic import BaseModel


class EspalierKeys(BaseModel):
    """Axolotl adds these fields to its own."""

    espalier_backend: Literal["auto", "espalier", "flex", "sdpa"] | None = None
    espalier_check: bool | None = None
    espalier_skip_logits: bool | None = None
    espalier_keep_groups: bool | None = None
