//! Checks of the QEMUs that run on a host: what each was started with, by its command line, and so what can
//! be plugged into it.

use serde_json::Value;

use super::check::{Check, Finding};
use super::machine::Machine;
use crate::qemu::{MORE_PORTS, PORT_TYPES};

pub(super) fn checks() -> Vec<Check> {
    vec![
        Check::new("vm-root-ports", root_ports),
        Check::new("vm-iommu", iommu),
        Check::new("vm-max-memory", max_memory),
    ]
}

/// A QEMU, as it was started.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Vm {
    pub(super) name: String,
    /// Devices are plugged into root ports there, and nowhere else.
    pub(super) is_q35: bool,
    /// Root ports that had no device at the start.
    pub(super) free_ports: usize,
    /// Whether interrupts of a doorbell device can reach a program of the guest.
    pub(super) has_iommu: bool,
    /// Up to where memory can be plugged.
    pub(super) max_memory: Option<String>,
}

/// `attach` plugs the memory and the channel.
const NEEDED_PORTS: usize = 2;

fn root_ports(machine: &Machine) -> Finding {
    let vms = match running(machine) {
        Ok(vms) => vms,
        Err(finding) => return finding,
    };
    let narrow: Vec<_> = vms
        .iter()
        .filter(|it| it.is_q35 && it.free_ports < NEEDED_PORTS)
        .map(|it| format!("{} had {} free", it.name, it.free_ports))
        .collect();
    match narrow.is_empty() {
        true => Finding::ok(match vms.len() {
            1 => format!("{} has a place for devices", vms[0].name),
            count => format!("all {count} machines have a place for devices"),
        }),
        false => Finding::warn(
            format!(
                "{} when started, and `vnplug attach` needs {NEEDED_PORTS} root ports on q35",
                narrow.join(", ")
            ),
            format!("give the machine more at its next start: for each {MORE_PORTS}"),
        ),
    }
}

fn iommu(machine: &Machine) -> Finding {
    let vms = match running(machine) {
        Ok(vms) => vms,
        Err(finding) => return finding,
    };
    let have: Vec<_> = { vms.iter() }
        .filter(|it| it.has_iommu)
        .map(|it| it.name.as_str())
        .collect();
    match have.is_empty() {
        true => Finding::ok(
            "no machine has an IOMMU: readers there are woken through the channel, not by a doorbell device, which needs \
             -device intel-iommu,intremap=on (q35)",
        ),
        false => Finding::ok(format!(
            "with an IOMMU, for a doorbell device: {}",
            have.join(", ")
        )),
    }
}

fn max_memory(machine: &Machine) -> Finding {
    let vms = match running(machine) {
        Ok(vms) => vms,
        Err(finding) => return finding,
    };
    let told = vms.iter().map(|it| match &it.max_memory {
        Some(most) => format!("{}: memory can be plugged up to {most}", it.name),
        None => format!(
            "{}: no maxmem: attach needs none, --memory pmem (for locked-down guests) does",
            it.name
        ),
    });
    Finding::ok(told.collect::<Vec<_>>().join("; "))
}

/// The QEMUs that run, or that there is none.
pub(super) fn running(machine: &Machine) -> Result<Vec<Vm>, Finding> {
    let is_qemu = |name: &str| name.starts_with("qemu-") || name == "kvm";
    let vms: Vec<_> = { machine.processes().into_iter() }
        .filter(|(_, name)| is_qemu(name))
        .filter_map(|(pid, _)| Some((machine.read(&format!("/proc/{pid}/cmdline")).ok()?, pid)))
        .filter_map(|(line, pid)| vm(&line, &pid))
        .collect();
    match vms.is_empty() {
        true => Err(Finding::skipped("no QEMU runs here")),
        false => Ok(vms),
    }
}

/// What a command line says, words with NUL between them; `None` if it starts no machine.
pub(super) fn vm(line: &str, pid: &str) -> Option<Vm> {
    let words: Vec<&str> = line.split('\0').collect();
    let mut vm = Vm {
        name: format!("process {pid}"),
        ..Vm::default()
    };
    let (mut ports, mut buses) = (Vec::new(), Vec::new());
    let mut is_machine = false;
    for pair in words.windows(2) {
        let &[option, value] = pair else { continue };
        let Some(option) = option.strip_prefix('-') else {
            continue;
        };
        is_machine = true;
        match option.trim_start_matches('-') {
            "name" => {
                let name =
                    key(value, "guest").unwrap_or_else(|| value.split(',').next().unwrap_or(value));
                vm.name = name.to_owned();
            }
            "machine" | "M" => vm.is_q35 = value.contains("q35"),
            "m" => vm.max_memory = key(value, "maxmem").map(str::to_owned),
            "device" => {
                let device = Device::of(value);
                vm.has_iommu |= device.driver.contains("iommu");
                match PORT_TYPES.contains(&device.driver.as_str()) {
                    true => ports.push(device.id),
                    false => buses.push(device.bus),
                }
            }
            _ => {}
        }
    }
    vm.free_ports = ports.iter().filter(|it| !buses.contains(it)).count();
    is_machine.then_some(vm)
}

/// One `-device`.
struct Device {
    driver: String,
    id: Option<String>,
    bus: Option<String>,
}

impl Device {
    /// `driver,id=…,bus=…`, or an object, as libvirt writes it.
    fn of(text: &str) -> Self {
        let object = serde_json::from_str::<Value>(text);
        let word = |name: &str| match &object {
            Ok(object) => object[name].as_str().map(str::to_owned),
            Err(_) => key(text, name).map(str::to_owned),
        };
        let first = || text.split(',').next().unwrap_or(text).to_owned();
        Self {
            driver: word("driver").unwrap_or_else(first),
            id: word("id"),
            bus: word("bus"),
        }
    }
}

/// The value of a key in `a,b=c,d=e`.
fn key<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let mut pairs = text.split(',').filter_map(|it| it.split_once('='));
    pairs.find(|(key, _)| *key == name).map(|(_, value)| value)
}
