#![no_main]
//! See [`vnplug_fuzz::segment`].

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vnplug_fuzz::segment::check(bytes));
