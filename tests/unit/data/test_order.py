import numpy as np

from graphtrain.data.shuffle import hash_indices, permutation, sample_mask


def test_a_permutation_has_every_number_once_and_depends_on_every_salt():
    orders = [permutation(1000, seed, epoch) for seed in range(3) for epoch in range(3)]
    assert all((np.sort(order) == np.arange(1000)).all() for order in orders)
    assert len({order.tobytes() for order in orders}) == 9


def test_a_permutation_does_not_depend_on_how_it_is_sorted():
    """No two hashes are equal, so orders are those of earlier versions, which sorted stably."""
    hashes = hash_indices(np.arange(100_000), 3, 1)
    expected = np.argsort(hashes, kind="stable")
    assert len(np.unique(hashes)) == len(hashes)
    assert (permutation(100_000, 3, 1) == expected).all()


def test_a_hash_without_salt_is_the_first_output_of_splitmix64():
    """Source: `new java.util.SplittableRandom(0).nextLong()`."""
    assert hash_indices(np.arange(1)).tolist() == [0xE220A8397B1DCDAF]


def test_hashes_are_those_of_earlier_versions():
    """If this fails, every dataset and every run changes."""
    assert hash_indices(np.arange(2), 0).tolist() == [0x397AB29740681D9, 0xDDC1ED05282D1D64]


def test_a_fraction_is_chosen_and_a_larger_one_includes_it():
    numbers = np.arange(100_000)
    few, many = sample_mask(numbers, 0.05, 7), sample_mask(numbers, 0.5, 7)
    assert abs(few.mean() - 0.05) < 0.005
    assert (few <= many).all()
    assert not sample_mask(numbers, 0.0, 7).any()
