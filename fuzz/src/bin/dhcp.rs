#![no_main]
//! See [`vnplug_fuzz::dhcp`].

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vnplug_fuzz::dhcp::check(bytes));
