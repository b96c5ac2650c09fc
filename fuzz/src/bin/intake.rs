#![no_main]
//! See [`vnplug_fuzz::intake`].

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vnplug_fuzz::intake::check(bytes));
