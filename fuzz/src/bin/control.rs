#![no_main]
//! See [`vnplug_fuzz::control`].

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vnplug_fuzz::control::check(bytes));
