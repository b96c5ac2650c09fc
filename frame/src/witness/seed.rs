//! Seeds of randomized tests.

use std::hash::{BuildHasher, RandomState};

/// The seed of a test in this run, never 0: a new one each time, or that of `VNPLUG_SEED`. It is
/// printed, so that a failed run can be repeated.
///
/// # Panics
/// If `VNPLUG_SEED` is no number.
pub fn seed(test: &str) -> u64 {
    let seed = match std::env::var("VNPLUG_SEED") {
        Ok(text) => text.parse().expect("VNPLUG_SEED is a number"),
        Err(_) => RandomState::new().hash_one(test),
    };
    let seed = seed.max(1);
    println!("{test}: VNPLUG_SEED={seed} repeats it");
    seed
}
