"""Models for the command line: loading any, and the embedded ones from the package index."""

from lade.models.loading import LoadedModel as LoadedModel
from lade.models.loading import load as load
