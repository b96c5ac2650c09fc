#![no_main]
//! See [`vnplug_fuzz::quic`].

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vnplug_fuzz::quic::check(bytes));
