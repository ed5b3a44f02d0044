"""Where the Hydra configuration lies: inside an installed package, or at the top of a checkout."""

from pathlib import Path

import lightning_cocod


def conf_dir() -> Path:
    """The folder that holds `train.yaml`.

    Raises:
        FileNotFoundError: the installation lacks it.
    """
    package = Path(lightning_cocod.__file__).parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "train.yaml").is_file():
            return folder
    raise FileNotFoundError(f"no conf/train.yaml in or beside {package}: install lightning-cocod again")
