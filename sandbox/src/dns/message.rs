//! Messages of the DNS: questions as programs send them, answers as they get them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use simple_dns::rdata::{CNAME, OPT, PTR, RData};
use simple_dns::{
    CLASS, OPCODE, Packet, PacketFlag, QCLASS, QTYPE, Question, RCODE, ResourceRecord, TYPE,
};

use crate::learned::LONGEST;
use crate::name::Name;

/// A question that may be asked, if the name may be.
#[derive(Clone, Debug)]
pub struct Query {
    /// What is asked for.
    pub name: Name,
    id: u16,
    question: Question<'static>,
    is_recursive: bool,
    /// How long an answer by UDP may be; `None` without EDNS.
    edns: Option<u16>,
}

/// What comes back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The message for the program.
    pub bytes: Vec<u8>,
    /// The addresses that are in it, and how long they live.
    pub addresses: Vec<(IpAddr, Duration)>,
    /// Addresses that were left away.
    pub left_away: Vec<IpAddr>,
}

/// Reads a question.
///
/// # Errors
/// The message that says what is wrong with it; `None` for what is no question at all, and gets no answer.
pub fn read(bytes: &[u8]) -> Result<Query, Option<Vec<u8>>> {
    let [id_high, id_low, flags_high, ..] = *bytes else {
        return Err(None);
    };
    if bytes.len() < HEADER || flags_high & 0x80 != 0 {
        return Err(None);
    }
    let id = u16::from_be_bytes([id_high, id_low]);
    let bad = |code| Some(bare(id, code));
    if flags_high >> 3 & 0xf != 0 {
        return Err(bad(RCODE::NotImplemented));
    }
    // The counts first: the parser makes room for what they promise.
    let counts = counts(bytes);
    if counts[0] != 1 || counts[1] != 0 || counts[2] != 0 || counts[3] > 2 {
        return Err(bad(RCODE::FormatError));
    }
    let packet = Packet::parse(bytes).map_err(|_| bad(RCODE::FormatError))?;
    let question = packet
        .questions
        .first()
        .ok_or_else(|| bad(RCODE::FormatError))?;
    let name = name(&question.qname).ok_or_else(|| bad(RCODE::NameError))?;
    let query = Query {
        name,
        id,
        question: question.clone().into_owned(),
        is_recursive: packet.has_flags(PacketFlag::RECURSION_DESIRED),
        edns: packet.opt().map(|opt| opt.udp_packet_size),
    };
    if question.qclass != QCLASS::CLASS(CLASS::IN) {
        return Err(Some(query.answer(RCODE::Refused)));
    }
    match question.qtype {
        QTYPE::TYPE(TYPE::OPT | TYPE::NULL | TYPE::Unknown(_)) => {
            Err(Some(query.answer(RCODE::NotImplemented)))
        }
        QTYPE::TYPE(_) => Ok(query),
        _ => Err(Some(query.answer(RCODE::Refused))),
    }
}

impl Query {
    /// An answer without records.
    pub fn answer(&self, code: RCODE) -> Vec<u8> {
        self.write(self.reply(code))
    }

    /// True if it is answered without asking anybody: nothing of that kind is handed out.
    pub fn is_hidden(&self) -> bool {
        matches!(self.question.qtype, QTYPE::TYPE(TYPE::HTTPS | TYPE::SVCB))
    }

    /// The address whose names are asked for, if that is the question.
    pub fn reverse(&self) -> Option<IpAddr> {
        if self.question.qtype != QTYPE::TYPE(TYPE::PTR) {
            return None;
        }
        reversed(self.name.as_str())
    }

    /// An answer that says which names an address has.
    pub fn names(&self, names: &[Name]) -> Vec<u8> {
        let mut reply = self.reply(if names.is_empty() {
            RCODE::NameError
        } else {
            RCODE::NoError
        });
        for name in names {
            let name = simple_dns::Name::new_unchecked(name.as_str());
            let owner = self.question.qname.clone();
            reply.answers.push(ResourceRecord::new(
                owner,
                CLASS::IN,
                SHORT,
                RData::PTR(PTR(name)),
            ));
        }
        self.write(reply)
    }

    /// What is asked upstream: name and type, nothing else of the program's message.
    pub fn forward(&self, id: u16) -> Vec<u8> {
        let mut packet = Packet::new_query(id);
        packet.set_flags(PacketFlag::RECURSION_DESIRED);
        let name = simple_dns::Name::new_unchecked(self.name.as_str());
        packet.questions.push(Question::new(
            name,
            self.question.qtype,
            QCLASS::CLASS(CLASS::IN),
            false,
        ));
        *packet.opt_mut() = Some(OPT {
            opt_codes: Vec::new(),
            udp_packet_size: UDP,
            version: 0,
        });
        packet.build_bytes_vec().unwrap_or_default()
    }

    /// Makes the program's answer of what came from upstream; `keep` says which addresses may be in it. `None` if
    /// the message does not answer the question with this `id`. The second value is true if the answer
    /// has to be asked for by TCP.
    pub fn filter(
        &self,
        id: u16,
        bytes: &[u8],
        keep: impl Fn(IpAddr) -> bool,
    ) -> Option<(Reply, bool)> {
        let counts = counts(bytes);
        let records: usize = counts[1..].iter().copied().map(usize::from).sum();
        if bytes.len() < HEADER || counts[0] != 1 || records > bytes.len() / RECORD {
            return None;
        }
        let packet = Packet::parse(bytes).ok()?;
        let question = packet.questions.first()?;
        let is_answer = packet.id() == id
            && packet.has_flags(PacketFlag::RESPONSE)
            && packet.opcode() == OPCODE::StandardQuery
            && name(&question.qname).as_ref() == Some(&self.name)
            && question.qtype == self.question.qtype;
        if !is_answer {
            return None;
        }
        let chain = chain(&self.name, &packet.answers);
        let mut reply = self.reply(match packet.rcode() {
            code @ (RCODE::NoError | RCODE::NameError | RCODE::Refused) => code,
            _ => RCODE::ServerFailure,
        });
        let (mut addresses, mut left_away) = (Vec::new(), Vec::new());
        for record in &packet.answers {
            let is_ours = name(&record.name).is_some_and(|owner| chain.contains(&owner));
            if !is_ours || record.class != CLASS::IN || is_left_out(&record.rdata) {
                continue;
            }
            let life = Duration::from_secs(record.ttl.into()).min(LONGEST);
            let address = match &record.rdata {
                RData::A(a) => Some(IpAddr::V4(Ipv4Addr::from_bits(a.address))),
                RData::AAAA(a) => Some(IpAddr::V6(Ipv6Addr::from_bits(a.address))),
                _ => None,
            };
            match address {
                Some(address) if !keep(address) => {
                    left_away.push(address);
                    continue;
                }
                Some(address) => addresses.push((address, life)),
                None => {}
            }
            let mut record = record.clone();
            record.ttl = u32::try_from(life.as_secs()).unwrap_or(0);
            // The program sees its own spelling of the name, as it expects to.
            if name(&record.name).as_ref() == Some(&self.name) {
                record.name = self.question.qname.clone();
            }
            reply.answers.push(record);
        }
        // How long there is nothing of the kind.
        let negative = packet
            .name_servers
            .iter()
            .find(|record| matches!(record.rdata, RData::SOA(_)));
        reply.name_servers.extend(negative.cloned());
        let is_cut = packet.has_flags(PacketFlag::TRUNCATION);
        Some((
            Reply {
                bytes: self.write(reply),
                addresses,
                left_away,
            },
            is_cut,
        ))
    }

    /// The answer as it fits into a datagram: if it does not, the program is told to ask by TCP.
    pub fn fit(&self, bytes: Vec<u8>) -> Vec<u8> {
        let room = self.edns.unwrap_or(PLAIN).clamp(PLAIN, UDP);
        if bytes.len() <= usize::from(room) {
            return bytes;
        }
        let mut cut = self.reply(RCODE::NoError);
        cut.set_flags(PacketFlag::TRUNCATION);
        self.write(cut)
    }

    fn reply(&self, code: RCODE) -> Packet<'_> {
        let mut packet = Packet::new_reply(self.id);
        packet.set_flags(PacketFlag::RECURSION_AVAILABLE);
        if self.is_recursive {
            packet.set_flags(PacketFlag::RECURSION_DESIRED);
        }
        *packet.rcode_mut() = code;
        packet.questions.push(self.question.clone());
        if self.edns.is_some() {
            *packet.opt_mut() = Some(OPT {
                opt_codes: Vec::new(),
                udp_packet_size: UDP,
                version: 0,
            });
        }
        packet
    }

    /// What cannot be written is a failure of ours.
    fn write(&self, packet: Packet<'_>) -> Vec<u8> {
        packet
            .build_bytes_vec_compressed()
            .unwrap_or_else(|_| bare(self.id, RCODE::ServerFailure))
    }
}

/// The names from the one that was asked for along the aliases.
fn chain(asked: &Name, answers: &[ResourceRecord<'_>]) -> Vec<Name> {
    let mut chain = vec![asked.clone()];
    let aliases: Vec<(Name, Name)> = answers
        .iter()
        .filter_map(|record| match &record.rdata {
            RData::CNAME(CNAME(target)) if record.class == CLASS::IN => {
                Some((name(&record.name)?, name(target)?))
            }
            _ => None,
        })
        .take(CHAIN)
        .collect();
    for _ in 0..aliases.len() {
        let last = chain.last().cloned();
        match aliases
            .iter()
            .find(|(owner, _)| Some(owner) == last.as_ref())
        {
            Some((_, target)) if !chain.contains(target) => chain.push(target.clone()),
            _ => break,
        }
    }
    chain
}

/// Records that are not handed out.
fn is_left_out(data: &RData<'_>) -> bool {
    matches!(
        data,
        RData::HTTPS(_) | RData::SVCB(_) | RData::OPT(_) | RData::NULL(..) | RData::Empty(_)
    )
}

fn name(name: &simple_dns::Name<'_>) -> Option<Name> {
    Name::from_labels(name.get_labels().iter().map(AsRef::as_ref)).ok()
}

/// `1.2.0.192.in-addr.arpa`, `….ip6.arpa`.
fn reversed(name: &str) -> Option<IpAddr> {
    if let Some(digits) = name.strip_suffix(".in-addr.arpa") {
        let parts: Vec<u8> = digits
            .split('.')
            .map(str::parse)
            .collect::<Result<_, _>>()
            .ok()?;
        let [d, c, b, a] = parts.as_slice() else {
            return None;
        };
        return Some(Ipv4Addr::new(*a, *b, *c, *d).into());
    }
    let digits = name.strip_suffix(".ip6.arpa")?;
    let mut bits = 0_u128;
    let mut count = 0;
    for digit in digits.split('.') {
        let value = u128::from_str_radix(digit, 16)
            .ok()
            .filter(|_| digit.len() == 1)?;
        bits |= value.checked_shl(4 * count)?;
        count += 1;
    }
    (count == 32).then(|| Ipv6Addr::from_bits(bits).into())
}

/// An answer to what could not be read: a header alone.
fn bare(id: u16, code: RCODE) -> Vec<u8> {
    let mut packet = Packet::new_reply(id);
    *packet.rcode_mut() = code;
    packet.build_bytes_vec().unwrap_or_default()
}

/// How many questions, answers, name servers and others the header promises.
fn counts(bytes: &[u8]) -> [u16; 4] {
    let count = |at: usize| match bytes.get(at..at + 2) {
        Some(&[high, low]) => u16::from_be_bytes([high, low]),
        _ => 0,
    };
    [count(4), count(6), count(8), count(10)]
}

const HEADER: usize = 12;
/// No record is shorter: RFC 1035, section 4.1.3.
const RECORD: usize = 11;
/// What a datagram holds without EDNS, and what we take and give with it: it fits any link.
const PLAIN: u16 = 512;
const UDP: u16 = 1232;
/// The longest chain of aliases.
const CHAIN: usize = 16;
/// How long an answer about an address holds, in seconds.
const SHORT: u32 = 10;
