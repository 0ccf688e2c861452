# SPDX-License-Identifier: Apache-2.0
"""One line in the settings of other trainers: plugins by which their models train on trees."""
