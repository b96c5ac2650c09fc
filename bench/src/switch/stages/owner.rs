//! Whose a sample is.

use super::perf::{Frame, Pids, Sample};
use super::symbols::Symbols;
use super::table::{Group, Part, group};

/// In whose time a processor was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// The guest's kernel and its programs.
    Guest,
    /// The switch's program.
    Switch,
    /// The host's kernel, in the guest's time, the switch's or nobody's.
    Host,
    /// The far machine: no part of what is asked about.
    Far,
    /// Nobody of the stream, or an idle processor.
    Nobody,
}

/// Whose a sample is, its group, and the function that it was in.
pub(super) fn owner(sample: &Sample, pids: &Pids, symbols: &Symbols) -> (Owner, Group, String) {
    let Some(first) = sample.frames.first() else {
        return (Owner::Nobody, Group::Other, String::new());
    };
    let is_guest = pids.guest.contains(&sample.pid);
    if first.is_kernel() {
        let chain = own_part(&sample.frames);
        let owner = of_kernel(sample.pid, is_guest, pids, &chain);
        let group = group(Part::HostKernel, chain.iter().copied());
        return (owner, group, first.symbol.clone());
    }
    if is_guest {
        let (group, name) = in_guest(first, symbols);
        (Owner::Guest, group, name)
    } else if pids.switches.contains(&sample.pid) {
        let group = group(Part::Switch, std::iter::once(first.symbol.as_str()));
        (Owner::Switch, group, first.symbol.clone())
    } else if sample.pid == pids.far {
        (Owner::Far, Group::Misc, first.symbol.clone())
    } else {
        (Owner::Nobody, Group::Misc, first.symbol.clone())
    }
}

/// The functions down to what was interrupted: that has nothing to do with them.
pub(super) fn own_part(frames: &[Frame]) -> Vec<&str> {
    let names = frames.iter().filter(|frame| frame.is_kernel());
    let mut chain: Vec<&str> = names.map(|frame| frame.symbol.as_str()).collect();
    let interrupts =
        |name: &&str| name.starts_with("asm_sysvec_") || name.starts_with("asm_common_interrupt");
    if let Some(at) = chain.iter().position(interrupts) {
        chain.truncate(at + 1);
    }
    chain
}

/// The far machine's stack works in anybody's time, since packets arrive where they were sent; and what
/// arrives from it is the host's work, in whose time it may be.
fn of_kernel(pid: u32, is_guest: bool, pids: &Pids, chain: &[&str]) -> Owner {
    let has = |names: &[&str]| {
        let is = |name: &&str| names.iter().any(|it| name.starts_with(it));
        chain.iter().any(is)
    };
    if has(&FAR_STACK) {
        Owner::Far
    } else if has(&["net_rx_action"]) {
        Owner::Host
    } else if pid == pids.far {
        Owner::Far
    } else if is_guest || pids.switches.contains(&pid) {
        Owner::Host
    } else {
        Owner::Nobody
    }
}

/// Only the far machine has a stack of IP on the host.
const FAR_STACK: [&str; 9] = [
    "ip_rcv",
    "ip_list_rcv",
    "ip_sublist_rcv",
    "ip_local_deliver",
    "tcp_v4_rcv",
    "tcp_tsq_handler",
    "tcp_tasklet",
    "tcp_write_timer",
    "tcp_delack_timer",
];

fn in_guest(frame: &Frame, symbols: &Symbols) -> (Group, String) {
    if let Some(name) = symbols.at(frame.address) {
        let group = group(Part::GuestKernel, std::iter::once(name));
        return (group, name.to_owned());
    }
    let name = format!("{} ({})", frame.symbol, frame.object);
    let group = if frame.symbol.contains("memmove") || frame.symbol.contains("memcpy") {
        Group::PerByte
    } else if frame.object.contains("vde") {
        // User-mode Linux speaks to a switch of VDE by a program of its own.
        Group::Netfront
    } else if LIBRARIES.iter().any(|it| frame.object.contains(it)) {
        // The guest's kernel calls its host.
        Group::Hypervisor
    } else if frame.object.ends_with("linux.uml") {
        Group::Other
    } else {
        // The guest's programs.
        Group::Misc
    };
    (group, name)
}

const LIBRARIES: [&str; 4] = ["/libc.", "/ld-linux", "[vdso]", "uml-xstate"];

#[cfg(test)]
mod tests {
    use super::*;

    const KERNEL: u64 = 0xffff_ffff_8100_0000;

    fn told(pid: u32, address: u64, names: &[&str]) -> (Owner, Group) {
        let pids = Pids {
            guest: vec![10, 11],
            switches: [20, 21],
            far: 30,
        };
        let symbols = Symbols::parse("0000000060001000 T tcp_ack\n").unwrap();
        let frames = names.iter().map(|name| Frame {
            address,
            symbol: (*name).to_owned(),
            object: "/usr/bin/linux.uml".to_owned(),
        });
        let sample = Sample {
            pid,
            time_s: 0.0,
            frames: frames.collect(),
        };
        let (owner, group, _) = owner(&sample, &pids, &symbols);
        (owner, group)
    }

    #[test]
    fn what_a_guest_s_kernel_does_is_told_by_its_own_symbols() {
        let told = told(11, 0x6000_1010, &["[unknown]"]);
        assert_eq!(told, (Owner::Guest, Group::TcpRx));
    }

    #[test]
    fn the_far_machine_s_stack_is_its_own_in_anybody_s_time() {
        let softirq = ["process_backlog", "net_rx_action", "do_softirq"];
        let far = [&["tcp_ack", "tcp_v4_rcv", "ip_rcv"], &softirq[..]].concat();
        assert_eq!(told(20, KERNEL, &far).0, Owner::Far);
        assert_eq!(told(30, KERNEL, &["tcp_sendmsg_locked"]).0, Owner::Far);
        let bridge = [&["br_handle_frame"], &softirq[..]].concat();
        assert_eq!(told(30, KERNEL, &bridge), (Owner::Host, Group::NonProto));
        assert_eq!(told(0, KERNEL, &bridge).0, Owner::Host);
    }

    #[test]
    fn idle_processors_and_other_programs_do_not_count() {
        assert_eq!(
            told(0, KERNEL, &["pv_native_safe_halt", "do_idle"]).0,
            Owner::Nobody
        );
        assert_eq!(told(99, 0x1000, &["main"]).0, Owner::Nobody);
        assert_eq!(told(99, KERNEL, &["vfs_read"]).0, Owner::Nobody);
    }

    #[test]
    fn what_was_interrupted_is_not_who_called() {
        let chain = [
            "nobody_knows",
            "asm_sysvec_apic_timer_interrupt",
            "tun_get_user",
        ];
        assert_eq!(told(10, KERNEL, &chain), (Owner::Host, Group::Hypervisor));
    }
}
