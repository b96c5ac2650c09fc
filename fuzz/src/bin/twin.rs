#![no_main]
//! See [`vnplug_fuzz::twin`].

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vnplug_fuzz::twin::check(bytes));
