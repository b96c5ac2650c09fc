#![no_main]
//! See [`vnplug_fuzz::names`].

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vnplug_fuzz::names::check(bytes));
