#![no_main]
//! See [`vnplug_fuzz::pcap`].

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vnplug_fuzz::pcap::check(bytes));
