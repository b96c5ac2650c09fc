//! scapy, which captures through libpcap once it is told to.

use vnplug_e2e::programs::{Place, Stage, same};

#[test]
fn scapy_sniffs_the_same_packets() {
    let stage = Stage::new().unwrap_or_else(|error| panic!("{error}"));
    let uml = stage.uml().unwrap();
    let script = r#"/usr/bin/python3 -u -c '
from scapy.all import AsyncSniffer, conf, sniff
conf.use_pcap = True
def show(packet):
    print(repr(packet.time), packet.wirelen, bytes(packet).hex())
every = AsyncSniffer(iface="{dev}", prn=lambda packet: None)
every.start()
sniff(iface="{dev}", filter="icmp or icmp6 or udp port 9", prn=show,
      started_callback=lambda: print("listening"), stop_filter=lambda p: p.dport == 9 if p.haslayer("UDP") else False)
import time
while len(every.results or []) == 0 and every.running and time.sleep(1): pass
for packet in every.stop(): show(packet)
print("done")'"#;
    let mut watch = stage
        .watch(&[&Place::Host, &uml], script, "listening")
        .unwrap();
    watch.talk("scapy").unwrap();
    let all = watch.wait_all().unwrap();
    same(&all, |text| text.lines().collect());
    let packets = all[0].lines(|line| line.len() > 80).len();
    assert!(packets > 80, "{}", all[0].text);
}
