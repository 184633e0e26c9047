"""Tables: what the last one says of a run."""

from emrun.cli.tables import summary

NAN = float("nan")


def test_the_last_table_skips_nan_and_has_the_variables_of_the_log_and_one_row_for_many_classes():
    classes = {"mean": 0.5, **{name: index / 10 for index, name in enumerate("abcdef")}}
    epochs = [
        {"epoch": epoch, "streams": {"valid": {"loss": {"mean": loss}, "f1": classes, "learning_rate": 0.1}}}
        for epoch, loss in enumerate((NAN, 3.0, 2.0, NAN))
    ]
    assert [line.split() for line in summary(epochs).splitlines()[2:]] == [
        ["valid", "loss", "nan", "2", "(2)", "3", "(1)"],
        ["valid", "f1", "0.5", "0.5", "(0)", "0.5", "(0)"],
        ["valid", "lowest", "f1", "a", "0,", "b", "0.1,", "c", "0.2"],
    ]
    assert [line.split()[:2] for line in summary(epochs, ["loss"]).splitlines()[2:]] == [["valid", "loss"]]
