"""The one home of the version number; setup.py reads it without importing the package."""

__version__ = "0.1.0"
