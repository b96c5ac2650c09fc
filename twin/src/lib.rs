//! Twin programs: one verified eBPF program, two instances, one data.
