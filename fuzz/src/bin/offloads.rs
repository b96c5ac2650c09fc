#![no_main]
//! See [`vnplug_fuzz::offloads`].

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vnplug_fuzz::offloads::check(bytes));
