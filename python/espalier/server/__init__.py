# SPDX-License-Identifier: Apache-2.0
"""`espalier serve`: the Tinker API on one's own machine."""
