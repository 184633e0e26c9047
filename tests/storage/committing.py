"""What the tests of this folder write into checkpoints, and how they look at directories."""

import json

from ruamel.yaml import YAML

from emrun.storage.checkpoints.commits import Names, commit
from emrun.storage.sealed import json_digest

FILES = {"model.safetensors": bytes(range(256)) * 4, "state.pt": b"state", "empty": b""}


def save(directory, files=FILES):
    for name, content in files.items():
        (directory / name).write_bytes(content)


def commit_at(root, iteration, *names, epoch=0, save=save):
    return commit(root, save, epoch=epoch, iteration=iteration, names=names or ("latest",))


def sealed(place, **changes):
    """Change fields of a manifest and make its checksum right again."""
    content = {**json.loads((place / "manifest.json").read_text()), **changes}
    del content["sha256"]
    (place / "manifest.json").write_text(json.dumps({**content, "sha256": json_digest(content)}))


def names_in(directory):
    return sorted(path.name for path in directory.iterdir())


def trace_of(run):
    return YAML(typ="safe", pure=True).load(run.directory / "trace.yaml")  # as emrun does


def tree(directory):
    """Return the files below a directory: path -> content."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def give_names(place, *names):
    known = Names(place.parent)
    known.look()
    known.move(dict.fromkeys(names, place.name))


def links_in(root):
    return {path.name: path.readlink().name for path in root.iterdir() if path.is_symlink()}
