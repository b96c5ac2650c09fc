#![no_main]
//! See [`vnplug_fuzz::settings`].

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vnplug_fuzz::settings::check(bytes));
