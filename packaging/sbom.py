#!/usr/bin/env python3
"""Writes the bill of materials of a release, SPDX 2.3 in JSON, to stdout.

    packaging/sbom.py VERSION COMMIT EPOCH COMPILER LIBRARY FILE...

COMPILER and LIBRARY are versions of Debian's packages: of g++, and of libstdc++, which is linked
in. Files are named as in SHA256SUMS. The same arguments give the same bytes.
"""

import datetime
import hashlib
import json
import os
import sys

NOASSERTION = 'NOASSERTION'
GCC_LICENCE = 'GPL-3.0-or-later WITH GCC-exception-3.1'


def package(name, version, licence, supplier, text, **more):
    return {
        'SPDXID': f'SPDXRef-Package-{name}',
        'name': name,
        'versionInfo': version,
        'supplier': supplier,
        'downloadLocation': NOASSERTION,
        'licenseConcluded': licence,
        'licenseDeclared': licence,
        'copyrightText': text,
        **more,
    }


def file_entry(path):
    with open(path, 'rb') as file:
        content = file.read()
    name = os.path.basename(path)
    return {
        'SPDXID': f'SPDXRef-File-{name}'.replace('_', '-'),
        'fileName': f'./{name}',
        'fileTypes': ['SOURCE' if name.endswith('.tar.gz') else 'BINARY'],
        'checksums': [
            {'algorithm': 'SHA1', 'checksumValue': hashlib.sha1(content).hexdigest()},
            {'algorithm': 'SHA256', 'checksumValue': hashlib.sha256(content).hexdigest()},
        ],
        'licenseConcluded': 'BSD-3-Clause' if name.endswith('.tar.gz')
                            else f'BSD-3-Clause AND {GCC_LICENCE}',
        'licenseInfoInFiles': [NOASSERTION],
        'copyrightText': NOASSERTION,
    }


def verification_code(files):
    """As SPDX 2.3 defines it: the SHA-1 of the sorted SHA-1s of all files."""
    sums = sorted(file['checksums'][0]['checksumValue'] for file in files)
    return hashlib.sha1(''.join(sums).encode()).hexdigest()


def main():
    version, commit, epoch, compiler, library, *paths = sys.argv[1:]
    created = datetime.datetime.fromtimestamp(int(epoch), datetime.timezone.utc)
    files = sorted((file_entry(path) for path in paths), key=lambda file: file['fileName'])
    turnstile = package(
        'turnstile', version, 'BSD-3-Clause', 'Organization: The Turnstile authors',
        'Copyright (c) 2026 the Turnstile authors', filesAnalyzed=True,
        packageVerificationCode={'packageVerificationCodeValue': verification_code(files)},
        licenseInfoFromFiles=[NOASSERTION], sourceInfo=f'built from the commit {commit}')
    libstdcxx = package(
        'libstdcxx', library, GCC_LICENCE, 'Organization: Free Software Foundation',
        'Copyright (C) Free Software Foundation, Inc.', filesAnalyzed=False,
        comment='Parts of it are linked in statically.')
    sdk = package(
        'redismodule.h', '7.0.15', 'BSD-3-Clause', 'Organization: Redis Ltd.',
        'Copyright (c) 2006-2020, Salvatore Sanfilippo',
        filesAnalyzed=False, comment='The header of the module API, from the source of Redis.')
    gcc = package(
        'gcc', compiler, 'GPL-3.0-or-later', 'Organization: Free Software Foundation',
        'Copyright (C) Free Software Foundation, Inc.', filesAnalyzed=False)

    def relationship(of, kind, to):
        return {'spdxElementId': of, 'relationshipType': kind, 'relatedSpdxElement': to}

    relationships = [relationship('SPDXRef-DOCUMENT', 'DESCRIBES', turnstile['SPDXID'])]
    for file in files:
        relationships.append(relationship(turnstile['SPDXID'], 'CONTAINS', file['SPDXID']))
        if file['fileTypes'] == ['BINARY']:
            relationships.append(
                relationship(file['SPDXID'], 'STATIC_LINK', libstdcxx['SPDXID']))
    relationships.append(relationship(turnstile['SPDXID'], 'DEPENDS_ON', sdk['SPDXID']))
    relationships.append(relationship(gcc['SPDXID'], 'BUILD_TOOL_OF', turnstile['SPDXID']))

    json.dump({
        'spdxVersion': 'SPDX-2.3',
        'dataLicense': 'CC0-1.0',
        'SPDXID': 'SPDXRef-DOCUMENT',
        'name': f'turnstile-{version}',
        'documentNamespace': f'https://spdx.org/spdxdocs/turnstile-{version}-{commit}',
        'creationInfo': {
            'created': created.strftime('%Y-%m-%dT%H:%M:%SZ'),
            'creators': ['Tool: packaging/sbom.py', 'Organization: The Turnstile authors'],
        },
        'packages': [turnstile, libstdcxx, sdk, gcc],
        'files': files,
        'relationships': relationships,
    }, sys.stdout, indent=2, sort_keys=True)
    print()


if __name__ == '__main__':
    main()
