# SPDX-License-Identifier: Apache-2.0
"""What the YAML of Axolotl may have for Espalier."""

from pydantic import BaseModel


class EspalierKeys(BaseModel):
    """Axolotl adds these fields to its own."""

    espalier_backend: str | None = None
    espalier_check: bool | None = None
    espalier_skip_logits: bool | None = None
    espalier_keep_groups: bool | None = None
