#![no_main]
//! See [`vnplug_fuzz::filter`].

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vnplug_fuzz::filter::check(bytes));
