# SPDX-License-Identifier: Apache-2.0
"""The page of `espalier inspect --html` and of `Report.html`, and the files that it consists of."""
