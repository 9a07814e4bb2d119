"""Builds the tff-partial wheel, which pyproject.toml describes."""

import setuptools

setuptools.setup()
