from emrun import AbstractHook


class CountBatches(AbstractHook):
    """Logs how many batches were run.

    hooks:
      - CountBatches: {word: batches}
    """

    def __init__(self, word: str = "batches"):
        super().__init__()
        self._word = word
        self._count = 0

    def after_batch(self, stream_name):
        self._count += 1

    def after_training(self, success):
        import logging

        logging.getLogger(__name__).info("%d %s", self._count, self._word)
