# SPDX-License-Identifier: Apache-2.0
"""Kernels of libraries for the operators on GPUs, and how these and our own are checked and timed there from Python."""
