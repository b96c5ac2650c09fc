#![no_main]
//! See [`vnplug_fuzz::rules`].

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vnplug_fuzz::rules::check(bytes));
