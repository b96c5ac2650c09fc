#![no_main]
//! See [`vnplug_fuzz::direct`].

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vnplug_fuzz::direct::check(bytes));
