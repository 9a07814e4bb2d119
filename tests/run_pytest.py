"""Runs the test files named on the command line under pytest, for Bazel."""

import sys

import pytest

if __name__ == '__main__':
  sys.exit(pytest.main(sys.argv[1:]))
