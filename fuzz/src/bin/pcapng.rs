#![no_main]
//! See [`vnplug_fuzz::pcapng`].

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vnplug_fuzz::pcapng::check(bytes));
