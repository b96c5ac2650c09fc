//! Guests whose network is a port by the module.

use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::ends::{all_fetch_files, all_ping, take_addresses};
use vnplug_e2e::station::Station;
use vnplug_e2e::{Guest, Image, Lab, Qemu, QemuConfig, Uml, UmlConfig};
use vnplug_testing::eventually;

use crate::support::{environment, ports};

/// User-mode Linux has libvdeplug within it, which runs `vde_plug` for what it does not know.
#[test]
fn guests_are_ports_by_the_drivers_that_they_have() {
    let lab = Lab::new().unwrap();
    let mut daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let env = environment(&lab, &daemon);
    let station = Station::by_plug(&lab, "vnplug://lan0", &env, "10.77.2.1").unwrap();
    let uml = Uml::boot(
        &lab,
        UmlConfig {
            kernel_args: vec!["eth0=vde,vnplug://lan0".into()],
            env: env.clone(),
            ..UmlConfig::default()
        },
    );
    let card = "virtio-net-pci,netdev=lan,mac=52:54:00:77:02:03";
    let qemu = Qemu::boot(
        &lab,
        QemuConfig {
            image: Image::default().module("virtio_net"),
            qemu_args: ["-netdev", "vde,id=lan,sock=vnplug://lan0", "-device", card]
                .map(str::to_owned)
                .to_vec(),
            env,
            ..QemuConfig::default()
        },
    );
    let guests: [(Guest, &str); 2] = [(uml.unwrap(), "10.77.2.2"), (qemu.unwrap(), "10.77.2.3")];
    take_addresses(&guests);
    all_ping(&station, &guests);
    assert_eq!(ports(&daemon), 3);
    all_fetch_files(&lab, &station, &guests, 10 << 20);
    daemon.audit();

    daemon.kill();
    daemon.launch().unwrap();
    eventually("all are back", || ports(&daemon) == 3);
    all_ping(&station, &guests);
}
