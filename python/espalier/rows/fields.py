# SPDX-License-Identifier: Apache-2.0
"""Names of fields of rows."""

ROW_NUMBERS = ("reward", "temperature", "top_k", "top_p")  # with a number for each row
