import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec

from emrun import AbstractHook


class Upload(AbstractHook):
    """Copies checkpoints to a store in a thread; what goes wrong is logged, and never ends the run.

    The store gets `URL/RUN/it-00000450/` for each checkpoint, and the files `URL/RUN/best.txt`, ..., with the name of
    the directory. The manifest is copied last: a directory with the same manifest is complete. Nothing is deleted
    there.
    """

    files = (".uploads/",)

    def __init__(self, url, names=("best", "latest"), **kwargs):
        super().__init__(**kwargs)
        self.store, root = fsspec.core.url_to_fs(url)
        self.root = f"{root}/{Path(self.output_dir).name}"
        self.names = names
        self.copies = Path(self.output_dir) / ".uploads"
        self.thread = ThreadPoolExecutor(1)

    def before_training(self):
        if self.main_loop.evaluating:
            return
        shutil.rmtree(self.copies, ignore_errors=True)  # what a process that was killed has left
        for name in self.names:  # of a run that is resumed, which may have been killed during an upload
            directory = Path(self.output_dir) / "checkpoints" / name
            if directory.exists():
                self.after_checkpoint(name, directory.resolve())

    def after_checkpoint(self, name, directory):
        if name not in self.names:
            return
        copy = self.copies / f"{name}-{directory.name}"
        try:  # hard links, because the checkpoint may be deleted during the upload
            shutil.copytree(directory, copy, copy_function=os.link, dirs_exist_ok=False)
            self.thread.submit(self.upload, name, directory.name, copy)
        except OSError:
            logging.exception("cannot upload %s", directory)

    def upload(self, name, checkpoint, copy):
        try:
            manifest, target = (copy / "manifest.json").read_bytes(), f"{self.root}/{checkpoint}"
            done = f"{target}/manifest.json"
            if not self.store.exists(done) or self.store.cat_file(done) != manifest:
                self.store.makedirs(target, exist_ok=True)
                for path in sorted(copy.iterdir(), key=lambda path: path.name == "manifest.json"):
                    self.store.put_file(str(path), f"{target}/{path.name}")
            self.store.pipe_file(f"{self.root}/{name}.txt", checkpoint.encode())
        except Exception:
            logging.exception("cannot upload %s as %s", checkpoint, name)
        finally:
            shutil.rmtree(copy, ignore_errors=True)

    def after_training(self):
        self.thread.shutdown()  # waits for what is not copied yet
        shutil.rmtree(self.copies, ignore_errors=True)
