//! Settings at work: VLANs, loops, slow wires, the console, and ports that come and go.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use vnplug_testing::eventually;

use self::clients::{Client, Vde};
use self::served::{ALL, frame};

mod clients;
#[expect(dead_code, reason = "for tests that look at what is captured")]
mod served;

/// Clients that are there, with the ports 1, 2, …
fn joined<const N: usize>(switch: &Vde) -> [Client; N] {
    let mut number = 0;
    [0; N].map(|_| {
        let client = Client::join(&switch.dir);
        number += 1;
        eventually("it has joined", || switch.count("switch_ports") == number);
        client
    })
}

fn tagged(frame: &[u8], vlan: u16) -> Vec<u8> {
    let mut tagged = frame.to_vec();
    let [high, low] = vlan.to_be_bytes();
    tagged.splice(12..12, [0x81, 0, high, low]);
    tagged
}

/// A wire between two clients, outside of the switch, until this is dropped.
struct Cable {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Cable {
    fn between(one: &Client, two: &Client) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let carry = |from: &Client, to: &Client| {
            let [from, to] = [from, to].map(|it| it.data.try_clone().unwrap());
            let stop = Arc::clone(&stop);
            let limit = Some(Duration::from_millis(20));
            from.set_read_timeout(limit).unwrap();
            std::thread::spawn(move || {
                let mut bytes = [0; 2000];
                while !stop.load(Ordering::Relaxed) {
                    if let Ok(len) = from.recv(&mut bytes) {
                        let _ = to.send(&bytes[..len]);
                    }
                }
            })
        };
        let threads = vec![carry(one, two), carry(two, one)];
        Self { stop, threads }
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread.join().unwrap();
        }
    }
}

#[test]
fn ports_of_a_vlan_hear_one_another_and_a_trunk_hears_tags() {
    let switch = Vde::here(|config| {
        config.settings.apply("port.9.vlan=9").unwrap();
    });
    let [a, b, trunk, other] = joined(&switch);
    let set = |port, text: &str| switch.board.set(Some(port), text).unwrap();
    (1..3).for_each(|port| set(port, "vlan=10"));
    set(3, "trunk=10+20");
    set(4, "vlan=20");
    // The last change is there when this is answered.
    assert_eq!(switch.board.show().unwrap().ports.len(), 4);
    let hello = frame(ALL, 1, 0, 60);
    a.send(&hello);
    assert_eq!(
        (b.next(), trunk.next()),
        (hello.clone(), tagged(&hello, 10))
    );
    let answer = frame(1, 3, 1, 60);
    trunk.send(&tagged(&answer, 10));
    assert_eq!(a.next(), answer);
    // To another VLAN, and out of none.
    a.send(&tagged(&hello, 20));
    trunk.send(&hello);
    eventually("all is counted", || switch.count("in_dropped_vlan") == 2);
    assert!([&a, &b, &trunk, &other].iter().all(|it| it.has_nothing()));
    switch.check_sums();
    let shown = switch.board.show().unwrap();
    let of = |port: usize, name: &str| {
        let counters = &shown.ports[port - 1].counters;
        counters.iter().find(|(key, _)| *key == name).unwrap().1
    };
    assert_eq!((of(1, "in_dropped_vlan"), of(3, "out_frames")), (1, 1));
    assert_eq!(shown.ports[2].settings.to_string(), "trunk=10+20");
    assert_eq!(shown.stations.len(), 2);
    // Without a loss for others.
    set(4, "default");
    set(4, "link=down");
    other.send(&hello);
    eventually("it is dropped", || switch.count("in_dropped_down") == 1);
    assert_eq!(switch.board.show().unwrap().ports[3].state, "down");
    for (port, text, part) in [
        (Some(1), "colour=red", "there are"),
        (Some(20_000), "vlan=1", "to 16384"),
        (None, "hub=maybe", "yes or no"),
    ] {
        let error = switch.board.set(port, text).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_loop_of_two_clients_is_cut_and_others_go_on() {
    let switch = Vde::here(|config| config.settings.apply("loops=shut").unwrap());
    let [one, two, station, other] = joined(&switch);
    let cable = Cable::between(&one, &two);
    let mut group = frame(ALL, 9, 0, 60);
    group[0] |= 1;
    station.send(&group);
    eventually("the loop is found", || switch.count("loops") > 0);
    eventually("and its port shut", || {
        let ports = switch.board.show().unwrap().ports;
        ports.iter().any(|it| it.state == "shut" && it.number < 3)
    });
    // What is in the sockets comes to an end.
    let mut before = u64::MAX;
    eventually("nothing goes round any more", || {
        let now = switch.count("flooded");
        std::thread::sleep(Duration::from_millis(100));
        std::mem::replace(&mut before, now) == now
    });
    let ports = switch.board.show().unwrap().ports;
    assert_eq!((ports[2].state, ports[3].state), ("up", "up"));
    other.data.set_nonblocking(true).unwrap();
    while other.data.recv(&mut [0; 100]).is_ok() {}
    other.data.set_nonblocking(false).unwrap();
    let hello = frame(ALL, 8, 1, 60);
    station.send(&hello);
    assert_eq!(other.next(), hello);
    switch.check_sums();
    drop(cable);
}

#[test]
fn a_loop_and_a_storm_in_one_vlan_cost_another_vlan_nothing() {
    let switch = Vde::here(|_| {});
    let [one, two, station, witness, a, b] = joined(&switch);
    let set = |port, text: &str| switch.board.set(Some(port), text).unwrap();
    (1..5).for_each(|port| set(port, "vlan=10"));
    (5..7).for_each(|port| set(port, "vlan=20"));
    assert_eq!(switch.board.show().unwrap().ports.len(), 6);
    // In turns: nothing else may come, and nothing may be missing.
    let mut number = 0;
    let mut speak = |count: u32| {
        for _ in 0..count {
            for (from, to, stations) in [(&a, &b, (1, 2)), (&b, &a, (2, 1))] {
                number += 1;
                let said = frame(stations.1, stations.0, number, 60);
                from.send(&said);
                assert_eq!(to.next(), said);
            }
        }
    };
    let cable = Cable::between(&one, &two);
    let mut group = frame(ALL, 9, 0, 60);
    group[0] |= 1;
    station.send(&group);
    eventually("the loop is found", || switch.count("loops") > 0);
    let before = switch.count("flooded");
    speak(2000);
    let around = switch.count("flooded") - before;
    // The control: it went round all the while, and who is in that VLAN heard it.
    assert!(around > 100 && !witness.has_nothing(), "{around}");
    (1..3).for_each(|port| set(port, "storm=100/s"));
    eventually("the storm is limited", || {
        switch.count("in_dropped_storm") > 0
    });
    drop(cable);
    // Others' storms, at their limit and far above it.
    set(3, "storm=100/s");
    let dropped = switch.count("in_dropped_storm");
    for round in 0..20 {
        for at in 0..50 {
            let mut many = frame(ALL, 9, round * 50 + at, 60);
            many[0] |= 1;
            station.send(&many);
        }
        speak(50);
    }
    eventually("most of it is dropped", || {
        switch.count("in_dropped_storm") > dropped + 500
    });
    assert!(a.has_nothing() && b.has_nothing());
    switch.check_sums();
}

#[test]
fn a_slow_wire_takes_its_time_and_loses_what_is_said() {
    let switch = Vde::here(|_| {});
    let [sender, slow, fast] = joined(&switch);
    let set = |text: &str| switch.board.set(Some(2), text).unwrap();
    set("delay=100ms loss=20% seed=3");
    let begun = Instant::now();
    for number in 0..200 {
        sender.send(&frame(ALL, 1, number, 60));
        fast.next();
    }
    let mut came: Vec<Vec<u8>> = vec![slow.next()];
    assert!(begun.elapsed() >= Duration::from_millis(100));
    let arrived = |switch: &Vde| 200 - switch.count("out_dropped_loss");
    eventually("some are lost", || {
        (20..60).contains(&switch.count("out_dropped_loss"))
    });
    while (came.len() as u64) < arrived(&switch) {
        came.push(slow.next());
    }
    assert!(came.is_sorted_by_key(|frame| frame[14..18].to_vec()));
    switch.check_sums();
    // What is on its way arrives before what comes now.
    set("default delay=50ms");
    sender.send(&frame(ALL, 1, 1000, 60));
    eventually("it is on its way", || switch.count("entered") == 201);
    set("default");
    sender.send(&frame(ALL, 1, 1001, 60));
    let numbers = [slow.next(), slow.next()].map(|it| it[16..18].to_vec());
    assert_eq!(
        numbers,
        [1000_u16, 1001].map(|it| it.to_be_bytes().to_vec())
    );
    // A bounded queue.
    set("rate=1M");
    for number in 0..20_000 {
        sender.send(&frame(ALL, 1, number, 1500));
        fast.next();
    }
    eventually("it is full", || switch.count("out_dropped_full") > 10_000);
    switch.check_sums();
    let holder = vnplug_switch::Holder {
        owner: "a test".into(),
        is_trusted: true,
        way: "ring",
        description: String::new(),
    };
    let ring = switch.board.join(holder, None, None);
    let error = switch
        .board
        .set(Some(ring.unwrap().get()), "delay=1ms")
        .unwrap_err();
    assert!(error.contains("has rings"), "{error}");
}

#[test]
fn who_comes_and_goes_costs_others_nothing() {
    let switch = Vde::here(|config| {
        config.settings.apply("default.storm=100000/s").unwrap();
        config
            .settings
            .apply("port.1.storm=no port.2.storm=no")
            .unwrap();
        config.settings.ports.clear();
    });
    let [one, two] = joined(&switch);
    (1..3).for_each(|port| switch.board.set(Some(port), "vlan=7").unwrap());
    two.send(&frame(ALL, 2, 0, 60));
    one.next();
    let stop = Arc::new(AtomicBool::new(false));
    let (stopped, dir) = (Arc::clone(&stop), switch.dir.clone());
    let churn = std::thread::spawn(move || {
        let begun = Instant::now();
        let mut there = std::collections::VecDeque::new();
        let mut joined = 0_u32;
        while joined < 1000 && !stopped.load(Ordering::Relaxed) {
            let client = Client::join(&dir);
            client.send(&frame(ALL, 3 + (joined % 200) as u8, joined, 60));
            there.push_back(client);
            if there.len() > 20 {
                there.pop_front();
            }
            joined += 1;
            let due = Duration::from_millis(10) * joined;
            std::thread::sleep(due.saturating_sub(begun.elapsed()));
        }
        (joined, begun.elapsed())
    });
    let mut exchanged = 0_u32;
    while !churn.is_finished() {
        let there = frame(2, 1, exchanged, 60);
        one.send(&there);
        assert_eq!(two.next(), there);
        let back = frame(1, 2, exchanged, 1514);
        two.send(&back);
        assert_eq!(one.next(), back);
        exchanged += 1;
    }
    let (joined, took) = churn.join().unwrap();
    assert_eq!(joined, 1000);
    eprintln!("1,000 ports in {took:?}; {exchanged} frames each way meanwhile, none lost");
    eventually("all are gone", || switch.count("switch_ports") == 2);
    assert_eq!(switch.count("stations"), 2);
    switch.check_sums();
}

/// What a person says on the console, and is answered.
struct Person(UnixStream);

impl Person {
    fn ask(&mut self, line: &str) -> String {
        self.0.write_all(format!("{line}\n").as_bytes()).unwrap();
        self.answer()
    }

    fn answer(&mut self) -> String {
        let mut text = String::new();
        let mut bytes = [0; 4096];
        while !text.ends_with("\nvde$ ") {
            let len = self.0.read(&mut bytes).unwrap();
            assert!(len > 0, "{text}");
            text += std::str::from_utf8(&bytes[..len]).unwrap();
        }
        text
    }
}

#[test]
fn the_console_makes_vlans_as_vde_switch_does() {
    let switch = Vde::here(|config| {
        let vde = config.vde.as_mut().unwrap();
        let path = vde.dir.with_extension("mgmt");
        vde.mgmt = Some((path, 0o600));
    });
    let [a, b, trunk] = joined(&switch);
    let socket = UnixStream::connect(switch.dir.with_extension("mgmt")).unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    let mut person = Person(socket);
    assert!(person.answer().starts_with("VDE switch V.2"));
    for (line, begin) in [
        ("port/setvlan 1 10", "1006"),
        ("vlan/create 10", "1000 Success"),
        ("vlan/create 10", "1017"),
        ("vlan/create 0", "1022"),
        ("vlan/create 4095", "1022"),
        ("port/setvlan 1 10", "1000 Success"),
        ("port/setvlan 2 10", "1000 Success"),
        ("port/setvlan 77 10", "1006"),
        ("vlan/addport 10 3", "1000 Success"),
        ("vlan/addport 11 3", "1006"),
        ("vlan/delport 10 1", "1098"),
        ("vlan/remove 10", "1098"),
        ("vlan/create 30", "1000 Success"),
        ("vlan/remove 30", "1000 Success"),
        ("vlan/remove 30", "1006"),
        ("port/create 40", "1000 Success"),
        ("port/create 40", "1017"),
        ("port/remove 40", "1000 Success"),
        ("port/remove 40", "1006"),
        ("port/remove 1", "1098"),
        ("port/epclose 1 9", "1006"),
        (
            "fstp/setfstp 1",
            "1038 Function not implemented: no spanning tree",
        ),
        ("fstp/setfstp 0", "1000 Success"),
        ("port/set 2 storm=100/s", "1000 Success"),
        ("port/set 2 storm=many", "1022 Invalid argument: storm is"),
        ("switch/set loops=shut", "1000 Success"),
        ("plugin/add x", "1038"),
    ] {
        let said = person.ask(line);
        assert!(said.starts_with(begin), "{line}: {said}");
    }
    let vlans = person.ask("vlan/print");
    let want = "0000 DATA END WITH '.'\n\
                VLAN 0000\n -- Port 0003 tagged=0 active=1 status=Forwarding\n\
                VLAN 0010\n -- Port 0001 tagged=0 active=1 status=Forwarding\n \
                -- Port 0002 tagged=0 active=1 status=Forwarding\n \
                -- Port 0003 tagged=1 active=1 status=Forwarding\n.\n1000 Success\n";
    assert!(vlans.starts_with(want), "{vlans}");
    assert!(
        person
            .ask("port/print 1")
            .contains("Port 0001 untagged_vlan=0010 ACTIVE")
    );
    assert!(person.ask("port/print 2").contains("storm=100/s"));
    assert!(person.ask("switch/print").contains("loops=shut"));
    let hello = frame(ALL, 1, 0, 60);
    a.send(&hello);
    assert_eq!(
        (b.next(), trunk.next()),
        (hello.clone(), tagged(&hello, 10))
    );
    let hash = person.ask("hash/print");
    assert!(hash.contains("VLAN 0010 to port: 001"), "{hash}");
    // Port 3 is in VLAN 0, too, as every port is at first; nobody else is there.
    trunk.send(&frame(ALL, 3, 0, 60));
    eventually("it is for nobody", || switch.count("consumed") == 1);
    assert!(person.ask("vlan/delport 10 3").starts_with("1000"));
    assert!(person.ask("port/epclose 1 1").starts_with("1000"));
    eventually("the port is closed", || switch.count("switch_ports") == 2);
    eventually("what was said of it is kept for who asks for it", || {
        let port = person.ask("port/allprint 1");
        port.contains("untagged_vlan=0010 INACTIVE - NOT Unnamed")
    });
    let _next = Client::join(&switch.dir);
    eventually("it has another port", || switch.count("switch_ports") == 3);
    assert!(
        person
            .ask("port/print 4")
            .contains("Port 0004 untagged_vlan=0000")
    );
}
