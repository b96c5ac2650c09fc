#![no_main]
//! See [`vnplug_fuzz::hello`].

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vnplug_fuzz::hello::check(bytes));
