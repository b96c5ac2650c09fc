#![no_main]
//! See [`vnplug_fuzz::tunnels`].

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vnplug_fuzz::tunnels::check(bytes));
