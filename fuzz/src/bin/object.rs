#![no_main]
//! See [`vnplug_fuzz::object`].

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vnplug_fuzz::object::check(bytes));
