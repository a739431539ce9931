"""Runs a script of the package nvidia-long-context-eval as it is: python -m tests.eval.packaged SCRIPT [ARGUMENT ...]

Only what the package would download or never uses here is replaced: nltk's sentence splitter by the packaged one, and
pandas, with which its scorer writes tables.
"""

import os
import runpy
import sys
from pathlib import Path
from unittest.mock import MagicMock

import long_context_eval
import nltk.tokenize
import punkt

if __name__ == "__main__":
    nltk.tokenize.sent_tokenize = punkt.sent_tokenize
    sys.modules["pandas"] = MagicMock()
    script = Path(long_context_eval.__path__[0]) / sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(script.parent))
    os.environ["TQDM_DISABLE"] = "1"
    runpy.run_path(str(script), run_name="__main__")
