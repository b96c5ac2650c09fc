//! Which function does which kind of work: the groups of Menon's figures 2.7 and 2.8, with what does that
//! work today.
//!
//! A function belongs to the longest beginning of its name in the tables. What stands in none is a lock, a
//! list or the like: in the host's kernel it belongs to who called it.

use Group::{Buffer, Driver, Hypervisor, Misc, Netback, Netfront, NonProto, PerByte, TcpRx, TcpTx};

/// A kind of work, in Menon's order; his `xen` is `hypervisor`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Group {
    /// Copies and checksums.
    PerByte,
    /// Bridge, netfilter, forwarding of a switch; queues of interfaces, on the host and in the guest.
    NonProto,
    /// The host's end of the channel to the guest: TAP, vhost-user in the switch, sockets of VDE.
    Netback,
    /// The guest's end: `virtio_net`, the vector driver, the driver of VDE.
    Netfront,
    /// TCP and IP of the guest, received.
    TcpRx,
    /// TCP and IP of the guest, sent.
    TcpTx,
    /// Buffers of packets (`sk_buff`), memory for them.
    Buffer,
    /// The real interface: veth and `AF_PACKET`.
    Driver,
    /// What makes a guest a guest: ptrace, signals, scheduling, timers, wake-ups, page tables, and the
    /// entrance of system calls.
    Hypervisor,
    /// Other work that is known: files, programs.
    Misc,
    /// In no table.
    Other,
}

impl Group {
    pub(super) const ALL: [Self; 11] = [
        PerByte,
        NonProto,
        Netback,
        Netfront,
        TcpRx,
        TcpTx,
        Buffer,
        Driver,
        Hypervisor,
        Misc,
        Self::Other,
    ];

    /// Its name in figures.
    pub(super) const fn name(self) -> &'static str {
        match self {
            PerByte => "per-byte",
            NonProto => "non-proto",
            Netback => "netback",
            Netfront => "netfront",
            TcpRx => "tcp-rx",
            TcpTx => "tcp-tx",
            Buffer => "buffer",
            Driver => "driver",
            Hypervisor => "hypervisor",
            Misc => "misc",
            Self::Other => "other",
        }
    }
}

/// Beginnings of names.
type Rules = &'static [(Group, &'static [&'static str])];

/// Linux, as the host's kernel and as the guest's.
#[rustfmt::skip]
const LINUX: Rules = &[
    (PerByte, &[
        "memcpy", "__memcpy", "__pi_memcpy", "memmove", "__memmove", "copy_from_", "copy_to_",
        "_copy_from_", "_copy_to_", "__copy_from_", "__copy_to_", "copy_page", "copyin", "copyout", "raw_copy_",
        "rep_movs", "csum_", "__csum", "do_csum", "skb_checksum", "__skb_checksum", "skb_copy_bits",
        "skb_copy_datagram", "__skb_datagram_iter", "simple_copy_to_iter", "skb_copy_and_csum", "iov_iter_",
        "__check_object_size", "check_heap_object", "__check_heap_object", "__virt_addr_valid",
    ]),
    (NonProto, &[
        "br_", "nf_", "ip_sabotage_in", "netif_", "__netif_", "net_rx_action", "net_tx_action",
        "process_backlog", "enqueue_to_backlog", "napi_", "__napi_", "dev_", "__dev_", "sch_", "qdisc_",
        "__qdisc", "pfifo_", "fq_codel", "noqueue_", "validate_xmit", "eth_", "neigh_", "netdev_", "__netdev",
        "passthru_features", "deliver_skb", "get_rps_cpu", "skb_network_protocol", "gro_", "__gro",
        "skb_csum_hwoffload", "___neigh", "deliver_ptype", "__vlan_", "arp_",
    ]),
    (TcpRx, &[
        "tcp_v4_rcv", "tcp_v4_do_rcv", "tcp_v4_early_demux", "tcp_v4_fill_cb", "tcp_rcv", "tcp_ack", "tcp_data_", "tcp_recvmsg",
        "tcp_queue_rcv", "tcp_try_", "tcp_clean_rtx", "tcp_event_data_recv", "tcp_rack", "tcp_rate_", "tcp_update_",
        "tcp_cleanup_rbuf", "tcp_rbtree", "tcp_grow_window", "tcp_validate", "tcp_parse", "tcp_ofo",
        "tcp_add_backlog", "tcp_inq", "tcp_check_space", "tcp_fast", "tcp_in", "tcp_cong", "tcp_gro", "tcp4_gro",
        "__tcp_ack", "__tcp_select_window", "inet_gro", "dev_gro_receive", "skb_gro", "napi_gro", "ip_rcv",
        "ip_list_rcv", "ip_sublist_rcv", "ip_local_deliver", "ip_protocol_deliver", "ip_route_input", "inet_recvmsg",
        "sock_recvmsg", "sock_read_iter", "__sys_recv", "__x64_sys_recv", "sys_recv", "sock_def_readable", "sk_wait_data",
        "sk_filter", "__sk_filter", "bictcp", "cubictcp", "cubic", "__inet_lookup", "inet_ehashfn", "raw_local_deliver",
        "__release_sock", "sk_backlog_rcv", "l3mdev_", "xfrm4_", "skwq_", "fib_validate",
    ]),
    (TcpTx, &[
        "tcp_", "__tcp_", "ip_", "__ip_", "inet_", "__inet", "ipv4_", "sk_", "__sk_", "lock_sock", "release_sock",
        "sock_sendmsg", "__sock_sendmsg", "sock_write_iter", "__sys_send", "__x64_sys_send", "sys_send", "skb_segment",
        "skb_mac_gso", "__skb_gso", "tcp4_gso", "inet_gso", "dst_", "__skb_tso", "skb_gso", "rt_", "fib_", "sock_set_timeout",
    ]),
    (Buffer, &[
        "skb_", "__skb_", "sk_skb_reason", "kfree_skb", "__kfree_skb", "kfree_", "consume_skb", "__consume_", "alloc_skb",
        "__alloc_skb", "build_skb", "__build_skb", "napi_build_skb", "napi_alloc", "__napi_alloc", "__napi_kfree",
        "napi_consume", "napi_skb", "kmem_cache_", "__kmem", "kmalloc", "__kmalloc", "__do_kmalloc", "kfree", "__kfree", "ksize", "slab_", "__slab",
        "___slab", "allocate_slab", "new_slab", "get_partial", "put_cpu_partial", "deactivate_slab", "__put_partials", "get_any_partial",
        "get_from_any_partial", "alloc_pages", "__alloc_pages", "alloc_frozen", "__alloc_frozen",
        "get_page_from_freelist", "__free_pages", "__free_one", "free_unref", "free_pcp", "__free_frozen", "free_frozen", "free_one", "free_the_page",
        "free_compound", "free_pages", "free_large", "rmqueue", "__rmqueue", "page_frag", "__page_frag", "page_pool", "get_netmem", "sock_wfree",
        "sock_wmalloc", "sock_alloc_send", "sock_rfree", "__sock_wfree", "sock_efree", "sock_omalloc", "memcg_", "__memcg", "refill_obj", "obj_cgroup",
        "mod_objcg", "kvmalloc", "__kvmalloc", "kvfree", "sk_page_frag_refill", "skb_page_frag", "__folio_put", "put_page", "__put_page",
        "prep_new_page", "prep_compound", "__mod_zone", "mod_zone", "zone_", "__zone", "setup_object", "shuffle_freelist", "__page_cache_release", "destroy_large", "destroy_compound",
        "unfreeze_partials", "__unfreeze", "pskb_", "__pskb", "___pskb", "__copy_skb_header", "virt_to_", "free_page_is_bad", "_compound_head", "get_page", "cache_from_obj",
    ]),
    (Hypervisor, &[
        "schedule", "__schedule", "finish_task_switch", "try_to_wake", "ttwu_", "wake_up", "__wake_up", "default_wake",
        "autoremove_wake", "pick_", "__pick", "enqueue_task", "enqueue_entity", "dequeue_task", "dequeue_entity", "dequeue_entities", "update_", "__update", "switch_", "__switch",
        "prepare_task", "psi_", "sched_", "set_next", "put_prev", "select_task", "select_idle", "place_entity", "hrtimer",
        "__hrtimer", "tick_", "timer", "__run_timers", "run_timer", "ktime_get", "timekeeping", "clockevents", "rcu_core", "rcu_do_batch", "read_tsc", "sysvec_",
        "asm_", "irq_", "__irq_", "handle_softirqs", "__do_softirq", "do_softirq", "check_preempt", "wakeup_preempt", "resched", "yield", "do_sched_yield", "cpuacct",
        "do_nanosleep", "account_", "scheduler_tick", "prepare_to_wait", "finish_wait", "do_wait", "avg_vruntime", "reweight", "task_tick", "kick_", "ksoftirqd", "idle_cpu", "__lock_timer", "internal_add_timer", "add_interrupt_randomness", "fast_mix", "random_get_entropy", "run_posix_cpu_timers", "__softirqentry",
    ]),
    (Misc, &[
        "vfs_", "ksys_", "do_iter_", "do_readv", "do_writev", "selinux_", "avc_", "tomoyo_", "netlbl_", "fdget", "fput", "__fget", "__fdget", "rw_verify", "security_", "fsnotify", "__fsnotify", "apparmor", "file_", "filemap_", "folio_",
        "lru_", "damon", "sock_poll", "new_sync", "import_", "__import",
        "sockfd_lookup", "__sys_", "___sys_", "____sys_", "move_addr", "do_sock",
    ]),
];

/// The host's kernel alone.
#[rustfmt::skip]
const HOST: Rules = &[
    // Merged here is merged before the guest: Menon counts it to what stands between driver and guest.
    (NonProto, &["dev_gro_receive", "tcp_gro", "tcp4_gro", "inet_gro", "skb_gro", "napi_gro"]),
    (Netback, &["tun_", "__tun", "tap_", "unix_dgram", "__unix_dgram", "unix_peer", "unix_write", "unix_scm", "scm_", "__scm", "maybe_add_creds"]),
    (Driver, &["veth_", "packet_", "__packet", "tpacket_", "prb_", "run_filter"]),
    (Hypervisor, &[
        "ptrace", "__ptrace", "arch_ptrace", "__x64_sys_ptrace", "get_signal", "do_signal", "send_signal", "__send_signal", "kill_", "__kill", "sigqueue", "__sigqueue",
        "complete_signal", "signal_", "dequeue_signal", "__dequeue_signal", "next_signal", "recalc_sig", "arch_do_signal", "__x64_sys_rt_sig", "do_rt_sig", "do_send", "__x64_sys_tgkill", "__x64_sys_tkill",
        "sigprocmask", "__set_task_blocked", "set_current_blocked", "__set_current_blocked", "restore_sigcontext", "setup_rt_frame", "x64_setup_rt", "get_sigframe", "restore_altstack", "__save_altstack",
        "do_sigaltstack", "force_sig", "do_notify", "fpu_", "fpu__", "__fpu", "xstate", "copy_fpstate", "copy_regset", "copy_siginfo",
        "copy_xstate", "__copy_xstate", "__copy_siginfo", "copy_uabi", "genregs", "putreg", "getreg", "regset", "__regset",
        "xfpregs", "save_xstate", "do_wait", "__do_wait", "kernel_wait", "__x64_sys_wait", "wait_", "wait_task", "wait_consider",
        "thread_group_cputime", "getrusage", "task_", "__task", "find_get_task", "futex", "do_futex", "__futex", "__x64_sys_futex", "poll_", "__poll", "do_poll", "do_sys_poll", "__x64_sys_poll",
        "__x64_sys_ppoll", "ep_", "__ep_", "do_epoll", "__x64_sys_epoll", "epoll_", "eventfd", "kill_fasync", "sock_wake_async", "send_sigio", "unix_stream", "unix_poll",
        "exc_page_fault", "do_user_addr_fault", "handle_mm", "__handle_mm", "do_anonymous", "do_wp_page", "wp_page", "do_fault", "do_mmap",
        "mmap_", "__mmap", "vm_mmap", "unmap_", "__unmap", "zap_", "vma_", "mprotect", "change_protection", "flush_tlb",
        "native_flush", "remap_", "tlb_", "__tlb", "mas_", "mt_", "__x64_sys_mmap", "__x64_sys_munmap", "__x64_sys_mprotect", "do_munmap", "do_vmi",
        "__vm_munmap", "shmem_", "access_process", "__access_remote", "get_user_pages", "__get_user_pages", "process_vm", "seccomp", "__seccomp",
        "pv_native_safe_halt", "__x64_sys_getpid", "__x64_sys_clock", "exit_to_user_mode_loop", "schedule_",
        // A signal for each frame, if the guest's interrupts come so.
        "f_setown", "f_modown", "do_fcntl",
    ]),
];

/// Entrances of the host's kernel. They stand at the end of each chain, and count only where they are its
/// beginning too.
const ENTRANCES: [&str; 10] = [
    "entry_SYSCALL",
    "do_syscall_64",
    "syscall_",
    "exit_to_user",
    "irqentry_",
    "__x64_sys_",
    "x64_sys_call",
    "srso_",
    "__get_user_nocheck",
    "ret_from_fork",
];

/// The guest's kernel alone. `MODULE:` are all functions of a module.
#[rustfmt::skip]
const GUEST: Rules = &[
    (PerByte, &["copy_chunk", "buffer_op", "do_op_one_page", "do_buffer_op", "maybe_map", "strncpy_chunk", "strnlen_chunk", "clear_user", "__clear_user", "do_csum"]),
    (Netfront, &[
        "virtio_net:", "net_failover:", "failover:", "virtqueue_", "vring_", "virtio_", "vu_", "vhost_user", "detach_buf", "sg_",
        "__sg", "dma_", "vector_", "uml_net", "uml_vector", "vde_", "daemon_", "tap_", "user_", "net_", "prep_msg", "build_transport", "writev_", "consume_vector", "get_recvmmsg",
        "destroy_mmsg", "tun_", "uml_raw", "legacy_", "raw_", "is_cooked", "prep_skb", "virtio16",
    ]),
    (Hypervisor, &[
        "userspace", "handle_", "sig_", "timer_", "hard_handler", "real_", "unblock_signals", "block_signals", "set_signals",
        "get_signals", "um_", "__um", "uml_", "os_", "start_userspace", "wait_stub", "do_syscall_stub", "write_ldt", "run_syscall_stub",
        "ptrace_", "get_skas", "set_skas", "save_", "restore_", "arch_", "map", "unmap", "flush_tlb", "fix_range", "update_pte", "do_ops", "add_mmap",
        "sigio_", "write_sigio", "do_IRQ", "do_signal", "interrupt_end", "segv", "relay_signal", "winch", "deactivate_", "reactivate_", "activate_", "itimer", "default_idle", "do_idle",
        "cpu_startup", "deferred", "from_irq", "to_irq", "generic_handle", "__handle_irq", "note_interrupt", "evdev", "epoll_", "time_travel", "local_irq", "switch_threads",
        "new_thread", "generic_file", "trace_hardirqs", "syscall_", "stub_", "put_fp", "get_fp", "task_size", "current_", "errno", "to_phys", "phys_", "free_irqs", "fatal_sigsegv", "vmalloc",
        "irq", "do_io", "virt_to_pte", "get_using_sysemu", "kernel_longjmp", "__usecs",
    ]),
    (Misc, &[
        "_raw_", "__raw", "rcu_", "__rcu", "mutex_", "__mutex", "memset", "__memset", "sys_", "__se_sys", "do_sys",
        "do_select", "do_epoll", "ep_", "poll_", "mod_timer", "__mod_timer", "pagefault_", "kmap_", "kunmap_", "__local_bh", "rb_next", "list_del", "__list_del",
    ]),
];

/// Our switch, `vde_switch`, and the C library. Names of Rust without `<` before them.
#[rustfmt::skip]
const SWITCH: Rules = &[
    (PerByte, &["__memmove_", "__memcpy_", "__memset_", "memmove", "memcpy", "vnplug_os::", "vnplug_frame::offload::sum", "vnplug_frame::sum"]),
    (NonProto, &[
        "vnplug_switch::", "vnplug_frame::", "handle_in_packet", "handle_tap_input", "find_in_hash", "qtime", "main",
    ]),
    // How it cuts and sums for a wire: Menon's offload driver.
    (Driver, &[
        "vnplug_frame::offload::", "vnplug_path::source::", "vnplug_switch::uplink::", "__sendmmsg", "sendmmsg",
    ]),
    (Netback, &["vnplug_switch::vhost::", "__libc_recv", "__send", "send_datasock", "__GI___libc_write", "__GI___libc_read"]),
    (Buffer, &["malloc", "cfree", "_int_malloc", "_int_free", "alloc::"]),
    (Misc, &["core::", "std::", "vnplug_", "__vdso", "clock_gettime", "__clock_gettime", "__poll", "__GI_", "__memcmp", "hashbrown::", "rustix::"]),
    (Hypervisor, &["vnplug_path::source::wake", "vnplug_switch::vhost::call"]),
];

/// Which part of the machine a function is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    HostKernel,
    GuestKernel,
    Switch,
}

/// The group of a chain of functions, the innermost first; only the host's kernel has more than one.
pub(super) fn group<'a>(part: Part, mut chain: impl Iterator<Item = &'a str>) -> Group {
    match part {
        Part::GuestKernel => chain
            .next()
            .and_then(|it| longest(&[LINUX, GUEST], it))
            .unwrap_or(Group::Other),
        Part::Switch => {
            let found = chain
                .next()
                .and_then(|it| longest(&[SWITCH], it.trim_start_matches('<')));
            found.unwrap_or(Group::Other)
        }
        Part::HostKernel => {
            let enters = |name: &str| ENTRANCES.iter().any(|it| name.starts_with(it));
            let (mut is_first, mut last) = (true, Group::Other);
            for name in chain {
                match longest(&[LINUX, HOST], name) {
                    // The only TCP of the host is the far machine's. These are what sockets of other kinds
                    // have in common with it, and belong to those.
                    Some(TcpRx | TcpTx) => last = Misc,
                    Some(group) => return group,
                    None if enters(name) && is_first => return Hypervisor,
                    None => {}
                }
                is_first = false;
            }
            last
        }
    }
}

/// Of the longest beginning of a name; of two as long the last.
fn longest(tables: &[Rules], name: &str) -> Option<Group> {
    let all = tables.iter().copied().flatten();
    let each = all.flat_map(|(group, begins)| begins.iter().map(move |begin| (*group, *begin)));
    let fits = each.filter(|(_, begin)| name.starts_with(begin));
    fits.max_by_key(|(_, begin)| begin.len())
        .map(|(group, _)| group)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(chain: &[&str]) -> Group {
        group(Part::HostKernel, chain.iter().copied())
    }

    fn guest(name: &str) -> Group {
        group(Part::GuestKernel, std::iter::once(name))
    }

    fn switch(name: &str) -> Group {
        group(Part::Switch, std::iter::once(name))
    }

    #[test]
    fn functions_of_the_host_s_kernel_have_their_groups() {
        for (name, expected) in [
            ("_copy_from_iter", PerByte),
            ("csum_partial", PerByte),
            ("br_handle_frame_finish", NonProto),
            ("br_nf_pre_routing", NonProto),
            ("__netif_receive_skb_core.constprop.0", NonProto),
            ("tcp4_gro_receive", NonProto),
            ("tun_get_user", Netback),
            ("unix_dgram_sendmsg", Netback),
            ("skb_release_data", Buffer),
            ("kmem_cache_alloc_node_noprof", Buffer),
            ("veth_xmit", Driver),
            ("tpacket_rcv", Driver),
            ("genregs_set", Hypervisor),
            ("finish_task_switch.isra.0", Hypervisor),
            ("do_syscall_64", Hypervisor),
            ("vfs_read", Misc),
        ] {
            assert_eq!(host(&[name]), expected, "{name}");
        }
    }

    #[test]
    fn a_lock_belongs_to_who_takes_it() {
        let root = ["do_syscall_64", "entry_SYSCALL_64_after_hwframe"];
        let chain = |first: [&'static str; 2]| [first, root].concat();
        let of = |holder| host(&chain(["_raw_spin_unlock_irq", holder]));
        assert_eq!(of("eventfd_write"), Hypervisor);
        assert_eq!(of("tun_net_xmit"), Netback);
        assert_eq!(
            host(&["sock_def_readable", "tpacket_rcv", "net_rx_action"]),
            Driver
        );
        // Nobody that is known: an entrance does not make it the hypervisor's.
        assert_eq!(of("nobody_knows"), Group::Other);
    }

    #[test]
    fn functions_of_the_guest_s_kernel_have_their_groups() {
        for (name, expected) in [
            ("tcp_rcv_established", TcpRx),
            ("tcp4_gro_receive", TcpRx),
            ("ip_rcv_core", TcpRx),
            ("tcp_sendmsg_locked", TcpTx),
            ("__ip_queue_xmit", TcpTx),
            ("virtio_net:start_xmit", Netfront),
            ("virtqueue_get_buf_ctx", Netfront),
            ("vector_net_start_xmit", Netfront),
            ("netif_receive_skb_list_internal", NonProto),
            ("__alloc_skb", Buffer),
            ("unblock_signals", Hypervisor),
            ("start_userspace", Hypervisor),
            ("_raw_spin_lock", Misc),
        ] {
            assert_eq!(guest(name), expected, "{name}");
        }
    }

    #[test]
    fn functions_of_switches_have_their_groups() {
        for (name, expected) in [
            ("__memmove_avx512_unaligned_erms", PerByte),
            ("vnplug_switch::forward::Forwarder::decide", NonProto),
            ("vnplug_frame::aggregate::Aggregator::join", NonProto),
            ("vnplug_switch::vhost::ring::Ring::chain", Netback),
            (
                "<vnplug_switch::vhost::link::Rings as vnplug_switch::link::Link>::receive",
                Netback,
            ),
            (
                "<vnplug_switch::uplink::Cable as vnplug_switch::link::Link>::send",
                Driver,
            ),
            ("vnplug_path::source::af_packet::rings::Rings::next", Driver),
            ("vnplug_switch::vhost::call::Call::ring", Hypervisor),
            ("find_in_hash_update", NonProto),
        ] {
            assert_eq!(switch(name), expected, "{name}");
        }
    }

    #[test]
    fn no_beginning_is_in_two_groups_of_a_table() {
        for table in [LINUX, HOST, GUEST, SWITCH] {
            for (at, (_, begins)) in table.iter().enumerate() {
                for (_, others) in &table[at + 1..] {
                    assert!(begins.iter().all(|it| !others.contains(it)), "{begins:?}");
                }
            }
        }
    }
}
