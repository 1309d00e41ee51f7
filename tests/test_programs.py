"""The size of tiny's programs: before the first step, a run mostly waits for their compilation."""

import jax

import train_gpt

# By version of jax: fusions and instructions of the training program and of validation's.
SIZES = {(0, 10): (969, 15823, 345, 5827), (0, 12): (1310, 14660, 457, 5190)}


def test_the_programs_of_tiny_are_no_larger():
    devices, c = train_gpt.fit_devices(train_gpt.PRESETS["tiny"])
    mesh = train_gpt.make_mesh(devices)
    train = train_gpt.compile_train_step(0, True, c, mesh).as_text()
    val = train_gpt.compile_val_step(0, c, mesh).as_text()
    sizes = [text.count(word) for text in (train, val) for word in (" fusion(", " = ")]
    known = SIZES[jax.__version_info__[:2]]
    assert all(size < 1.05 * was for size, was in zip(sizes, known, strict=True)), sizes
