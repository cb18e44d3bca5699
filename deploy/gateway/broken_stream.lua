-- If a replica is killed in the middle of a stream, the client gets its protocol's error event.
--
-- Envoy runs no filter after a chunked body breaks off. So the gateway requests streams that end with their
-- connection (x-specops-unframed), and replicas end each complete stream with the byte EOT, which no event
-- contains. This filter removes the byte; the client gets chunks as usual.
local EOT = '\4'
local MESSAGE = 'the replica that wrote this answer is gone; ask again'
local OPENAI = 'data: {"error":{"message":"%s","type":"server_error","param":null,"code":"replica_gone"}}\n\n'
local ANTHROPIC = 'event: error\n'
  .. 'data: {"type":"error","error":{"type":"api_error","message":"%s"},"request_id":%s}\n\n'
local OLLAMA = '{"error":"%s"}\n'

function envoy_on_request(handle)
  local path = handle:headers():get(':path')
  local event = path:find('^/api/') and OLLAMA or path:find('^/v1/messages') and ANTHROPIC or OPENAI
  handle:streamInfo():dynamicMetadata():set('broken_stream', 'event', event)
end

function envoy_on_response(handle)
  local headers = handle:headers()
  if not headers:get('x-specops-unframed') then return end
  headers:remove('x-specops-unframed')
  local id = headers:get('x-request-id') -- visible ASCII: replicas send no other
  local event = handle:streamInfo():dynamicMetadata():get('broken_stream').event
  event = event:format(MESSAGE, id and '"' .. id:gsub('[\\"]', '\\%0') .. '"' or 'null')
  local last = ''
  for chunk in handle:bodyChunks() do
    local length = chunk:length()
    if length > 0 then
      last = chunk:getBytes(length - 1, 1)
      if last == EOT then chunk:setBytes(chunk:getBytes(0, length - 1)) end
    elseif last ~= EOT then -- the end of the body is an empty chunk
      local gap = last == '\n' and '' or '\n\n' -- ends the half event before it
      chunk:setBytes(gap .. event)
    end
  end
end
