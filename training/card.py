"""Write the card of a trained model from what its training and evaluation left beside it.

    python -m training.card FOLDER

Every number of the card comes from log.json, evaluation.json and config.json of the folder.
"""

import argparse
import json
import math
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from checkpoints_convert import open_checkpoint
from training.learning import LANGUAGE_WEIGHT, QUESTION_WEIGHT
from training.schedule import PEAK_RATE


def main() -> None:
    """Write README.md into the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what training.train wrote")
    folder = parser.parse_args().folder
    (folder / "README.md").write_text(card(folder), encoding="utf-8")


def card(folder: Path) -> str:
    """The card's text."""
    source = open_checkpoint(folder)
    config = source.config
    log = json.loads((folder / "log.json").read_text(encoding="utf-8"))
    evaluation = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    template = Environment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(
        Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    )
    return template.render(
        parameters=f"{sum(math.prod(tensor.shape) for tensor in source.tensors.values()) / 1e6:.1f} million",
        layers=config["num_hidden_layers"],
        full_layers=[at for at, kind in enumerate(config["layer_types"]) if kind == "full_attention"],
        experts=config["num_experts"],
        chosen=config["num_experts_per_tok"],
        vocabulary=f"{config['vocab_size']:,}",
        command=log["command"],
        device=log["device"],
        date=log["date"][:10],
        versions=", ".join(f"{name} {log['versions'][name]}" for name in ("jax", "flax", "optax")),
        steps=f"{log['rows'][-1]['step']:,}",
        minutes=f"{log['rows'][-1]['seconds'] / 60:.1f}",
        lengths=[f"{length:,}" for length in dict.fromkeys(row["length"] for row in log["rows"])],
        tokens=f"{log['rows'][-1]['tokens'] / 1e6:.0f} million",
        peak_rate=PEAK_RATE,
        language_weight=LANGUAGE_WEIGHT,
        question_weight=QUESTION_WEIGHT,
        samples=evaluation["rows"][0]["samples"],
        rows=evaluation["rows"],
    )


if __name__ == "__main__":
    main()
