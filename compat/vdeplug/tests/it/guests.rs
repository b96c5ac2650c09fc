//! Guests whose network is a port by the module.

use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::ends::{End, all_fetch, files, sum};
use vnplug_e2e::station::Station;
use vnplug_e2e::{Guest, Image, Lab, Qemu, QemuConfig, Uml, UmlConfig};
use vnplug_testing::{PATIENCE, eventually};

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
    for (guest, address) in &guests {
        let up = format!("ip addr add {address}/24 dev eth0 && ip link set eth0 up");
        let done = guest.run(&up, PATIENCE).unwrap();
        assert!(done.success(), "{address}: {}", done.text());
    }
    let check = || {
        for (guest, address) in &guests {
            assert!(station.pings(address), "{address}");
            for other in guests
                .iter()
                .map(|(_, other)| other)
                .filter(|it| *it != address)
            {
                let done = guest.run(&format!("ping -c 3 {other}"), PATIENCE).unwrap();
                assert!(done.success(), "{}", done.text());
            }
        }
    };
    check();
    assert_eq!(ports(&daemon), 3);
    let www = files(&lab, 10 << 20).unwrap();
    let host = End::host(&station.netns, &lab, &www).unwrap();
    let guest = |guest| End::guest(guest, &www).unwrap();
    let [(uml, uml_address), (qemu, qemu_address)] = &guests;
    let ends = [
        (station.address.as_str(), host),
        (*uml_address, guest(uml)),
        (*qemu_address, guest(qemu)),
    ];
    all_fetch(&ends, &sum(&www));
    daemon.audit();

    daemon.kill();
    daemon.launch().unwrap();
    eventually("all are back", || ports(&daemon) == 3);
    check();
}
