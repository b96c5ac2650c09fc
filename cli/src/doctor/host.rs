//! Checks of a host.

use rustix::fs::statvfs;
use rustix::system::uname;

use super::check::{Check, Finding};
use super::machine::{self, Machine};

pub(super) fn checks() -> Vec<Check> {
    vec![
        Check::new("kernel", |_| kernel(&uname().release().to_string_lossy())),
        Check::new("lockdown", lockdown),
        Check::new("libpcap", libpcap),
        Check::new("bpf", bpf),
        Check::new("bpf-jit", bpf_jit),
        Check::new("bpf-filesystem", bpf_filesystem),
        Check::new("memlock", memlock),
        Check::new("shared-memory", shared_memory),
        Check::new("huge-pages", huge_pages),
    ]
}

/// Linux 5.9 is the least that is supported.
pub(super) fn kernel(release: &str) -> Finding {
    let mut numbers = release.split(|it: char| !it.is_ascii_digit());
    let mut next = || numbers.next().and_then(|it| it.parse::<u32>().ok());
    match next().zip(next()) {
        Some(version) if version >= (5, 9) => Finding::ok(format!("Linux {release}")),
        Some(_) => Finding::fail(
            format!("Linux {release} is too old"),
            "boot Linux 5.9 or newer",
        ),
        None => Finding::skipped(format!("Linux {release:?}: not understood")),
    }
}

fn lockdown(machine: &Machine) -> Finding {
    match super::guest::locked_down(machine).as_deref() {
        None => Finding::ok("this kernel has no lockdown"),
        Some("confidentiality") => Finding::warn(
            "the kernel is locked down for confidentiality: it loads no programs that read packets early",
            "boot with lockdown=integrity; until then the kernel drops nothing for the daemon",
        ),
        Some(mode) => Finding::ok(format!("lockdown: {mode}")),
    }
}

/// The compiler of filters.
fn libpcap(machine: &Machine) -> Finding {
    let cached = std::fs::read(machine.path("/etc/ld.so.cache")).unwrap_or_default();
    let name = b"libpcap.so.";
    match cached.windows(name.len()).any(|it| it == name) {
        true => Finding::ok("libpcap is there, for filters"),
        false => Finding::fail(
            "there is no libpcap: the daemon compiles no filter",
            "apt-get install libpcap0.8    (or: dnf install libpcap)",
        ),
    }
}

const JIT: &str = "/proc/sys/net/core/bpf_jit_enable";

fn bpf_jit(machine: &Machine) -> Finding {
    match machine.read(JIT).as_deref() {
        Ok("0") => Finding::warn(
            "the kernel interprets eBPF: early filters cost more",
            format!("sysctl -w net.core.bpf_jit_enable=1    (echo 1 >{JIT})"),
        )
        .fixed_by(|machine| machine.write(JIT, "1")),
        Ok(_) => Finding::ok("the kernel compiles eBPF"),
        Err(_) => Finding::skipped("the kernel does not say whether it compiles eBPF"),
    }
}

/// Programs of switches have their names there.
fn bpf_filesystem(machine: &Machine) -> Finding {
    let mounts = machine.read("/proc/mounts").unwrap_or_default();
    let mut kinds = mounts.lines().map(|it| it.split(' ').skip(1));
    match kinds.any(|mut it| it.next() == Some("/sys/fs/bpf") && it.next() == Some("bpf")) {
        true => Finding::ok("/sys/fs/bpf is a bpf filesystem"),
        false => Finding::warn(
            "/sys/fs/bpf is no bpf filesystem: no switch has a program in the kernel (twin=)",
            "mount -t bpf bpf /sys/fs/bpf",
        )
        .fixed_by(|_| machine::run("mount", &["-t", "bpf", "bpf", "/sys/fs/bpf"])),
    }
}

/// Pools of VMs are files there.
fn shared_memory(machine: &Machine) -> Finding {
    let Ok(about) = statvfs(machine.path("/dev/shm")) else {
        return Finding::fail(
            "there is no /dev/shm for pools of VMs",
            "mount -t tmpfs tmpfs /dev/shm",
        );
    };
    room(about.f_bavail * about.f_frsize)
}

/// `free` bytes of shared memory.
pub(super) fn room(free: u64) -> Finding {
    let text = format!("{} MiB are free in /dev/shm", free >> 20);
    match free >= ENOUGH_SHARED {
        true => Finding::ok(text),
        false => Finding::warn(
            format!("{text}: a VM's pool takes 64 MiB"),
            "mount -o remount,size=50% /dev/shm, or pool_dir= in vnplug.toml",
        ),
    }
}

fn huge_pages(machine: &Machine) -> Finding {
    let text = machine.read("/proc/meminfo").unwrap_or_default();
    let figure = |name: &str| {
        let line = text.lines().find_map(|it| it.strip_prefix(name))?;
        line.trim_start_matches(':').trim().parse::<u64>().ok()
    };
    match figure("HugePages_Total").zip(figure("HugePages_Free")) {
        Some((0, _)) if pools_are_huge(machine) => Finding::warn(
            "pools of VMs are to be made of huge pages (pool_dir), and none are set aside",
            "sysctl -w vm.nr_hugepages=32    (64 MiB of pages of 2 MiB: a VM's pool)",
        ),
        Some((0, _)) => Finding::ok("no huge pages are set aside; the daemon needs none"),
        Some((all, 0)) if pools_are_huge(machine) => Finding::warn(
            format!("all {all} huge pages are taken, and pools of VMs (pool_dir) are made of them"),
            format!(
                "sysctl -w vm.nr_hugepages={}    (or as many as pools need)",
                all + 32
            ),
        ),
        Some((all, free)) => Finding::ok(format!("{free} of {all} huge pages are free")),
        None => Finding::skipped("the kernel has no huge pages"),
    }
}

/// Whether the configuration has pools in a hugetlbfs.
fn pools_are_huge(machine: &Machine) -> bool {
    let config = machine.read("/etc/vnplug.toml").unwrap_or_default();
    let dir = config.lines().find_map(|line| {
        let (key, value) = line.split_once('=')?;
        (key.trim() == "pool_dir").then(|| value.trim().trim_matches(['"', '\'']).to_owned())
    });
    let mounts = machine.read("/proc/mounts").unwrap_or_default();
    let mut huge = mounts.lines().filter_map(|line| {
        let mut words = line.split(' ').skip(1);
        let at = words.next()?;
        (words.next() == Some("hugetlbfs")).then_some(at)
    });
    dir.is_some_and(|dir| huge.any(|at| std::path::Path::new(&dir).starts_with(at)))
}

/// Whether the kernel takes programs at all, and from whom.
fn bpf(machine: &Machine) -> Finding {
    match machine
        .read("/proc/sys/kernel/unprivileged_bpf_disabled")
        .as_deref()
    {
        Ok("0") => Finding::ok(
            "the kernel takes eBPF from every user of this host (sysctl -w kernel.unprivileged_bpf_disabled=2 ends that; \
             AF_XDP on Linux before 6.0 and a daemon without CAP_BPF use it)",
        ),
        Ok(_) if is_ordinary(machine) => Finding::ok(
            "the kernel takes eBPF from processes with CAP_BPF, and no thread of the daemon has it: nothing is dropped early \
             (a daemon that starts as root, with an interface in its configuration, keeps it)",
        ),
        Ok(_) => Finding::ok("the kernel takes eBPF, from processes with CAP_BPF"),
        Err(_) => Finding::warn(
            "the kernel has no bpf(2): nothing is dropped early, there is no af_xdp, and no program of a switch",
            "boot a kernel with CONFIG_BPF_SYSCALL",
        ),
    }
}

/// Whether a daemon runs that is not root's, and no thread of which has `CAP_BPF`.
fn is_ordinary(machine: &Machine) -> bool {
    let Some(pid) = machine.process("vnplugd") else {
        return false;
    };
    let threads = machine.names(&format!("/proc/{pid}/task")).into_iter();
    let mut all = threads.filter_map(|thread| {
        let status = machine.read(&format!("/proc/{pid}/task/{thread}/status"));
        let status = status.ok()?;
        let word = |key: &str| {
            let line = status.lines().find_map(|it| it.strip_prefix(key))?;
            line.split_whitespace().next()
        };
        let caps = u64::from_str_radix(word("CapPrm:")?, 16).ok()?;
        Some(word("Uid:")? != "0" && caps & CAP_BPF == 0)
    });
    let has_threads = all.next();
    has_threads == Some(true) && all.all(|it| it)
}

/// Locked memory of the daemon, or of one that this shell would start: packet memory of AF_XDP, and eBPF maps before
/// Linux 5.11. No agent and no reader locks any.
fn memlock(machine: &Machine) -> Finding {
    let (limits, of) = match machine.process("vnplugd") {
        Some(pid) => (format!("/proc/{pid}/limits"), "the daemon"),
        None => (
            "/proc/self/limits".to_owned(),
            "no daemon runs, and one that this shell starts",
        ),
    };
    let text = machine.read(&limits).unwrap_or_default();
    let line = text
        .lines()
        .find_map(|it| it.strip_prefix("Max locked memory"));
    let Some(limit) = line.and_then(|it| it.split_whitespace().next()) else {
        return Finding::skipped(format!("{limits} does not say"));
    };
    let bytes = limit.parse::<u64>().unwrap_or(u64::MAX);
    if bytes >= ENOUGH_LOCKED {
        return Finding::ok(format!("{of} may lock {limit} bytes"));
    }
    Finding::warn(
        format!("{of} may lock {limit} bytes only: an AF_XDP source may get no packet memory"),
        "LimitMEMLOCK=infinity in the unit (`systemctl edit vnplugd`), or `ulimit -l unlimited` before it",
    )
}

/// A source's packet memory is 16 MiB and more.
const ENOUGH_LOCKED: u64 = 256 << 20;
/// include/uapi/linux/capability.h: number 39.
const CAP_BPF: u64 = 1 << 39;
/// The default pool of a VM.
const ENOUGH_SHARED: u64 = 64 << 20;
