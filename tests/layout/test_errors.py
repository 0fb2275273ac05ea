"""Every error of the runtime crosses process borders, so each must come back from pickle as it was."""

import inspect
import pickle

import pytest

from rljob_runtime import errors

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, BaseException) and c.__module__ == errors.__name__]


def example(cls: type[BaseException]) -> BaseException:
    """An instance with a distinct text for each positional parameter; classes with that of exceptions get one message."""
    if not inspect.isfunction(cls.__init__):
        return cls("what broke and the remedy")
    parameters = list(inspect.signature(cls.__init__).parameters)[1:]
    return cls(*(f"<{name}>" for name in parameters))


def test_the_tree_was_found() -> None:
    assert {errors.RuntimeFault, errors.WorkerLostError, errors.DeadlineError} <= set(CLASSES)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_pickle_round_trip(cls: type[BaseException]) -> None:
    error = example(cls)
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back), back.args, vars(back)) == (cls, str(error), error.args, vars(error))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_class_says_when_it_is_raised(cls: type[BaseException]) -> None:
    assert (cls.__doc__ or "").startswith("Raised when"), f"{cls.__name__}'s docstring starts with: Raised when"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_one_tree(cls: type[BaseException]) -> None:
    assert issubclass(cls, errors.RuntimeFault) or issubclass(cls, errors.Interrupted)
